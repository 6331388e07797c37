"""Training of predictors: one layer after another, each a job of its own, then a choice over all layers.

    profile = load_profile(Path("profile"))
    predictors = train_predictors(Path("model"), profile, Path("predictors"), TrainOptions(accuracy_bound=0.001))

1. jobs      each layer is trained at several ranks (`fit_layer`); all of these candidates are kept
2. choice    one candidate a layer, so that the fewest bytes are read within the budget of parameters
3. check     the model's perplexity with all predictors; beyond the bound, layers that miss most get larger ones
"""
