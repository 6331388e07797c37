"""The job of one layer, from file to file."""

from pathlib import Path

import torch

from picompile.training.candidates import JobSettings, fit_layer
from picompile.training.data import load_layer_data
from picompile.training.results import save_result


def run_job(data: Path, result: Path, settings: JobSettings) -> None:
    """Trains the layer whose data lies in `data`, and writes `result`.

    On one thread: sums depend on how many share them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        save_result(result, fit_layer(load_layer_data(data), settings))
    finally:
        torch.set_num_threads(threads)
