"""The open inference protocol (version 2), which KServe and its clients speak, beside the service's own routes.

Source: https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol. The tensors of `MODEL` are
in `INPUTS` and `OUTPUTS`: N histories of at most L item ids, and for each of them k items. A shorter row is filled up
with the empty text, and its scores with 0.

Shape suffixes: N histories   L events   K items
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

import seqrec
from seqrec.serving import schemas
from seqrec.serving.service import Service

MODEL = "seqrec"
INPUTS = [
    {"name": "history", "datatype": "BYTES", "shape": [-1, -1]},
    {"name": "user", "datatype": "BYTES", "shape": [-1]},  # optional
]
OUTPUTS = [
    {"name": "items", "datatype": "BYTES", "shape": [-1, -1]},
    {"name": "scores", "datatype": "FP64", "shape": [-1, -1]},
    {"name": "recommendation_id", "datatype": "BYTES", "shape": [-1]},
]
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "there is no such model"}}


def _queries(body: schemas.Inference) -> list[schemas.Query]:
    """Return a request in the form of /recommend.

    Raises:
        ValueError: there is no tensor `history`, one is unknown, or sizes differ.
    """
    given = {tensor.name: tensor for tensor in body.inputs}
    if unknown := set(given) - {one["name"] for one in INPUTS}:
        raise ValueError(f"inputs: {min(unknown)!r:.100} is unknown; the inputs are history and user")
    if "history" not in given:
        raise ValueError("inputs: the tensor history is missing")
    history_NL = _rows(given["history"])
    user_N1 = _rows(given["user"]) if "user" in given else [[""]] * len(history_NL)
    if any(len(row) > 1 for row in user_N1):
        raise ValueError("inputs: the tensor user has several users in a row")
    user_N = [next(iter(row), "") for row in user_N1]
    if len(user_N) != len(history_NL):
        raise ValueError(f"inputs: {len(history_NL)} histories, but {len(user_N)} users")
    return [
        schemas.Query(history=[item for item in history if item], k=body.parameters.k, user=user or None)  # type: ignore[call-arg]
        for history, user in zip(history_NL, user_N, strict=True)
    ]


def _rows(tensor: schemas.TextTensor) -> list[list[str]]:
    """Return the elements of a tensor, a list per entry of the first dimension."""
    rows, width = (*tensor.shape, 1, 1)[:2]
    nested = [row for row in tensor.data if not isinstance(row, str)]
    if nested and (len(tensor.data) != rows or any(len(row) != width for row in nested)):
        raise ValueError(f"inputs: {tensor.name} has rows that do not fit its shape {tensor.shape}")
    flat = [one for row in tensor.data for one in ([row] if isinstance(row, str) else row)]
    if not tensor.shape or len(flat) != rows * width:
        raise ValueError(f"inputs: {tensor.name} has {len(flat)} elements, which do not fit its shape {tensor.shape}")
    if rows > schemas.MAX_BATCH:
        raise ValueError(f"inputs: at most {schemas.MAX_BATCH} histories in a request, not {rows}")
    return [flat[start : start + width] for start in range(0, rows * width, width)] if width else [[]] * rows


def _tensors(answers: list[schemas.Recommendation]) -> list[schemas.Tensor]:
    number, most = len(answers), max((len(answer.items) for answer in answers), default=0)
    item_NK = [[*answer.items, *[""] * (most - len(answer.items))] for answer in answers]
    score_NK = [[*answer.scores, *[0.0] * (most - len(answer.scores))] for answer in answers]
    ids = [answer.recommendation_id for answer in answers]
    return [
        schemas.Tensor(name="items", datatype="BYTES", shape=[number, most], data=list(chain(*item_NK))),
        schemas.Tensor(name="scores", datatype="FP64", shape=[number, most], data=list(chain(*score_NK))),
        schemas.Tensor(name="recommendation_id", datatype="BYTES", shape=[number], data=ids),
    ]


def add_routes(api: FastAPI, service: Service) -> None:
    """Add the routes of the protocol to the service."""

    def check(model: str) -> None:
        if model != MODEL:
            raise HTTPException(404, f"there is no model {model!r:.100}: the served model is called {MODEL}")

    @api.get("/v2")
    async def server() -> dict[str, Any]:
        """Describe the server."""
        return {"name": "seqrec", "version": seqrec.__version__, "extensions": []}

    @api.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Say that the service runs."""
        return {"live": True}

    @api.get("/v2/health/ready", responses={503: {"description": "there is no champion, or the service is ending"}})
    async def ready(response: Response) -> dict[str, bool]:
        """Say whether to send requests here, as /ready does."""
        response.status_code = 200 if service.ready else 503
        return {"ready": service.ready}

    @api.get("/v2/models/{model}", responses=UNKNOWN)
    async def metadata(model: str) -> dict[str, Any]:
        """Describe the model."""
        check(model)
        versions = [service.served.current[1]]
        return {"name": MODEL, "versions": versions, "platform": "seqrec", "inputs": INPUTS, "outputs": OUTPUTS}

    @api.get("/v2/models/{model}/ready", responses=UNKNOWN)
    async def model_ready(model: str) -> dict[str, Any]:
        """Say whether the model answers."""
        check(model)
        return {"name": MODEL, "ready": service.ready}

    @api.post("/v2/models/{model}/infer", responses=UNKNOWN)
    async def infer(model: str, request: Request, body: schemas.Inference) -> schemas.Inferred:
        """Recommend for several histories."""
        check(model)
        try:
            queries = _queries(body)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        answers = await service.answer(queries, request.state.caller)
        version = answers[0].version if answers else service.served.current[1]
        return schemas.Inferred(model_name=MODEL, model_version=version, id=body.id, outputs=_tensors(answers))
