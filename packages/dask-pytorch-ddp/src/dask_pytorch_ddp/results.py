"""Bring results, metrics and checkpoints back from the ranks."""

from ddp_results import DaskResultsHandler, S3ResultsHandler

__all__ = ["DaskResultsHandler", "S3ResultsHandler"]
