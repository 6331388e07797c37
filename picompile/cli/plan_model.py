"""What can be known to be wrong with what a user says of the model to plan."""

from picompile.cli.checks import require_model_folder
from picompile.errors import UsageError
from picompile.placement.model_source import ModelOptions


def check_model_options(options: ModelOptions) -> None:
    """Raises `UsageError` for what can be known to be wrong before anything is read."""
    if (options.source is None) == (options.shape is None):
        raise UsageError("give one of MODEL (a Hugging Face folder), PROFILE (of picompile profile) and --shape")
    _check_firing(options)
    if options.predictors is not None and options.predictor not in (None, "learned"):
        raise UsageError(f"--predictors: predictor {options.predictor} needs none; leave it out, or choose learned")
    if options.source is not None and not options.is_profile:
        require_model_folder(options.source)

    from picompile.placement.counting import Packing

    # Here for its checks alone: what is not known yet is valid.
    Packing(options.quant, options.predictor or "auto", options.context or 1, options.batch, options.kv_dtype)


def _check_firing(options: ModelOptions) -> None:
    if options.shape is not None:
        for name, value in (("profile", options.profile), ("predictors", options.predictors), ("work", options.work)):
            if value is not None:
                raise UsageError(f"--{name}: is of a model; with --shape, --firing says how neurons fire")
        if options.firing is None:
            raise UsageError("--shape needs --firing: the name of a curve, such as opt, or a share, such as 10%")
    if options.is_profile:
        for name, given in (("profile", options.profile), ("work", options.work), ("firing", options.firing)):
            if given is not None:
                raise UsageError(f"--{name}: {options.source} is a profile already")
    if options.firing is not None:
        if options.profile is not None:
            raise UsageError("--firing and --profile both say how neurons fire; give one of them")
        if options.work is not None:
            raise UsageError("--work: with --firing nothing is profiled; leave one of them out")
        from picompile.placement.curves import firing_of_curve

        firing_of_curve(options.firing, 1, 1)
