"""Predictors on disk: a folder that `picompile train` or `import-predictors` wrote, and how it enters a compilation.

    predictors = load_predictors(Path("predictors"))
    predictors.require_model(fingerprint, block_shapes(graph_module))
    predicted = predictors.insert_pass()(graph_module).graph_module
    runnable = materialize(predicted, predictors.weights(captured.weights))

A folder holds `predictors.json` (one entry a layer: kind, input, rank, threshold, what was measured of it) and
`predictors.safetensors` (`layers.N.fc1` [rank, hidden], `layers.N.fc2` [neurons, rank], `layers.N.bias` [neurons]).
"""
