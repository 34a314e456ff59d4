"""The registered model: a table of histories in, recommended items and scores out.

MLflow stores this file and runs it when the model is loaded (models from code), so nothing is ever pickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd

from seqrec.serving.recommender import Recommender, Request

DEFAULT_K = 10
REQUESTS_AT_ONCE = 256


class RecommenderModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc]
    """`seqrec.serving.recommender.Recommender` as an MLflow model."""

    def load_context(self, context: Any) -> None:
        """Load weights, card and vocabulary, which MLflow has laid side by side."""
        self.recommender = Recommender.load(Path(context.artifacts["weights"]).parent)

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Recommend for each row.

        The input has the column `history` (item ids, oldest first) and optionally `k`, `user`, `exclude` (item ids),
        `times` (seconds UTC, one an item of the history) and `at` (seconds UTC of the request); an empty cell counts as
        absent. The other arguments are unused.

        Returns:
            Columns `items` (ids, best first; fewer than `k` where the catalogue has no more), `scores`, `source` (the
            model, or `popularity` where no item of the history is known) and `unknown` (events that are not known).
        """
        requests = [_request(row) for row in model_input.to_dict("records")]
        answers = [
            self.recommender.answer(requests[i : i + REQUESTS_AT_ONCE])
            for i in range(0, len(requests), REQUESTS_AT_ONCE)
        ]
        columns = ("items", "scores", "source", "unknown")
        return pd.DataFrame({name: [getattr(answer, name) for part in answers for answer in part] for name in columns})


def _request(row: dict[Any, Any]) -> Request:
    given = {key: value for key, value in row.items() if not _is_empty(value)}
    return Request(
        history=list(given.get("history", ())),
        k=int(given.get("k", DEFAULT_K)),
        exclude=list(given.get("exclude", ())),
        user=given.get("user"),
        times=[float(time) for time in given["times"]] if "times" in given else None,
        at=float(given["at"]) if "at" in given else None,
    )


def _is_empty(value: Any) -> bool:
    return value is None or (pd.api.types.is_scalar(value) and bool(pd.isna(value)))


mlflow.models.set_model(RecommenderModel())
