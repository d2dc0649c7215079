"""``trlcompat doctor --training``: from parsed arguments to output and exit status. Imports no package of the stack."""

from __future__ import annotations

import argparse
import json
import sys

from pytest_trlcompat.catalog import measurements
from pytest_trlcompat.catalog.known_issues import Catalog
from pytest_trlcompat.doctor.stack_spec import StackSpec
from pytest_trlcompat.doctor.training_diagnosis import diagnose_training
from pytest_trlcompat.doctor.training_text import show
from pytest_trlcompat.training.reading.sources import read_training

__all__ = ["answer"]


def answer(parsed: argparse.Namespace, spec: StackSpec, catalog: Catalog) -> int:
    """Diagnose the training, print, and return the exit status.

    Returns:
        0 if no known issue bites, or none as bad as ``--fail-on``; 1 if one does, or without that one may.

    Raises:
        TrainingError: what was given is no training, or its trainer is not known.
    """
    training = read_training(parsed.training, trainer=parsed.trainer or "")
    diagnosis = diagnose_training(spec, catalog, measurements.published(catalog), training, parsed.strategy)
    if parsed.json:
        print(json.dumps(diagnosis.to_dict(), indent=1, default=str).replace("\x7f", "\\u007f"))
    else:
        show(diagnosis, sys.stdout)
    sys.stdout.flush()
    if parsed.fail_on:
        return int(diagnosis.reaches(parsed.fail_on))
    return int(bool(diagnosis.bite or diagnosis.may))
