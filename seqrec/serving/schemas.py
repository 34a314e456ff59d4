"""What the service reads and answers, as pydantic models: the published OpenAPI comes from these."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    model_validator,
)

from seqrec.artifacts import MAX_ID_LENGTH
from seqrec.serving.events import IMPORTED, UserHistory
from seqrec.serving.recommender import Request
from seqrec.serving.rules import NumberRange

MAX_HISTORY = 10_000  # events of a history; a body is held in memory
MAX_ALLOWED = 100_000  # ids of a list of what is available
MAX_BATCH = 1_000  # requests, or events, that are sent together
MAX_VALUES = 1_000  # values of an attribute in a filter
MAX_FACTORS = 50  # values of an attribute that are boosted, or have a quota
MAX_ITEMS = 1_000  # items of a list
MAX_NEW_ITEMS, MAX_ATTRIBUTES = 100, 20  # items that a request describes, and attributes of each
MAX_BYTES = 1_200  # of an id in the event store: PostgreSQL indexes two of them in 2,700 bytes, and no NUL
AHEAD_S = 86_400.0  # seconds by which the clock of a sender may be ahead
EARLIEST = 631_152_000  # 1990, the default of validate.min_date: earlier events would stop a retraining

UNCLEAN = re.compile("[\\x00-\\x1f\\x7f-\\x9f\ufffd]")  # what no id of a source may hold

By = Literal["champion", "candidate"]  # the model that is to answer
Factor = Annotated[float, Field(gt=0, le=1e6)]


def _written(value: Any) -> Any:
    """Return a whole number, as which many logs have ids, as text."""
    return str(value) if type(value) is int else value


Written = BeforeValidator(_written)
Id = Annotated[str, Field(max_length=1_000), Written]
Text = Annotated[str, Field(max_length=4_000), Written]


def _fits_index(text: str) -> str:
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise ValueError(f"must have at most {MAX_BYTES} bytes")
    return text


def _is_id(text: str) -> str:
    if len(text) > MAX_ID_LENGTH or not text or UNCLEAN.search(text):
        raise ValueError(
            f"must have at most {MAX_ID_LENGTH} characters, not all of them blank, and no control characters, which "
            "would stop a retraining"
        )
    return text


Stored = Annotated[str, Field(max_length=500, pattern=r"^[^\x00]*$"), Written, AfterValidator(_fits_index)]
Trimmed = StringConstraints(strip_whitespace=True)  # as ingest does
Item = Annotated[Id, Trimmed]
User = Annotated[Id, Trimmed, AfterValidator(_fits_index)]
Times = Annotated[list[FiniteFloat], Field(description="time of each event of the history, in seconds since 1970, UTC")]
At = Annotated[
    FiniteFloat,
    Field(description="time of the request, in seconds since 1970, UTC, for a model that reads it; default: now"),
]


class Body(BaseModel):
    """A request; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


class Query(Body):
    """A user's history, and the items to recommend; all ids are those of the data source."""

    # What the page of the API sends first; without it, that would be every field with a value that no model knows.
    model_config = ConfigDict(json_schema_extra={"examples": [{"history": ["50", "181"], "k": 10, "titles": True}]})

    history: list[Item] | None = Field(
        None,
        max_length=MAX_HISTORY,
        description="item ids, oldest first; if absent, the user's history in the event store",
        examples=[["50", "181"]],
    )
    k: int = Field(10, ge=1, le=MAX_ITEMS, description="number of items; a smaller catalogue gives fewer")
    exclude: list[Item] = Field(default_factory=list, max_length=MAX_HISTORY, description="item ids not to show")
    allow: list[Item] | None = Field(
        None, max_length=MAX_ALLOWED, description="the only item ids that may be shown; if absent, all may"
    )
    filter: dict[Id, Annotated[list[Id], Field(max_length=MAX_VALUES)] | NumberRange] = Field(
        default_factory=dict,
        max_length=MAX_ATTRIBUTES,
        description="attribute -> values, or a range of numbers; items must match every attribute",
        examples=[{"genres": ["Comedy", "Drama"], "year": {"min": 1990}}],
    )
    boost: dict[Id, Annotated[dict[Id, Factor], Field(max_length=MAX_FACTORS)]] = Field(
        default_factory=dict,
        max_length=MAX_ATTRIBUTES,
        description="attribute -> value -> factor that multiplies the likelihood of items with that value",
        examples=[{"genres": {"Drama": 2, "Horror": 0.5}}],
    )
    quota: dict[Id, Annotated[dict[Id, Annotated[int, Field(ge=0)]], Field(max_length=MAX_FACTORS)]] = Field(
        default_factory=dict,
        max_length=MAX_ATTRIBUTES,
        description="attribute -> value -> maximum number of items in the list with that value",
        examples=[{"genres": {"Comedy": 3}}],
    )
    diversity: float = Field(0.0, ge=0, le=1, description="0: the best items; 1: the items that differ most")
    explore: float = Field(
        0.0, ge=0, le=1, description="probability that a position shows a random item of the best candidates"
    )
    user: User | None = Field(None, description="user id; it may be unknown to the model")
    times: Times | None = None
    at: At | None = None
    items_text: dict[Item, Annotated[dict[Id, Text], Field(max_length=MAX_ATTRIBUTES)]] = Field(
        default_factory=dict,
        max_length=MAX_NEW_ITEMS,
        description="attributes by id of items that the model never saw; Recformer only",
        examples=[{"new": {"title": "A film of tomorrow"}}],
    )

    titles: bool = Field(False, description="also return the titles of the items")
    by: By | None = Field(
        None, description="version that must answer, for any user; the event store does not record the answer"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.history is None and (self.user is None or self.times is not None):
            raise ValueError("history is missing: give a history, or a user without times")
        self.request(UserHistory())
        return self

    def request(self, known: UserHistory) -> Request:
        """Return the request for the recommender; without a history, use the `known` history of the user."""
        fields = {name: value for name, value in vars(self).items() if name not in ("titles", "by")}
        if self.history is None:
            fields |= {"history": known.items, "times": known.times, "exclude": [*self.exclude, *known.hidden]}
        return Request(**fields)


class Queries(Body):
    """Several requests in one."""

    requests: list[Query] = Field(max_length=MAX_BATCH)


class Recommendation(BaseModel):
    """The best items, and how they were chosen."""

    items: list[str] = Field(description="item ids, best first")
    titles: list[str] | None = Field(None, description="titles of the items, if requested; empty if the model has none")
    scores: list[float]
    source: str = Field(description="name of the model, or `popularity` if the model knows no item of the history")
    unknown: int = Field(description="number of events of the history whose item the model does not know")
    notes: list[str]
    version: str = Field(description="version of the model in the registry")
    recommendation_id: str = Field(description="id of this answer; send it with the events that the answer leads to")


class Recommendations(BaseModel):
    """The answers, in the order of the requests."""

    answers: list[Recommendation]


class Listing(BaseModel):
    """Items for no user in particular, best first."""

    items: list[str]
    titles: list[str] = Field(description="titles of the items; empty if the model has none")
    scores: list[float]
    version: str = Field(description="version of the model in the registry")


class History(BaseModel):
    """A user's history in the event store."""

    items: list[str] = Field(description="oldest first")
    titles: list[str] = Field(description="titles of the items; empty if the model has none")


class Titled(BaseModel):
    """An item, and its title as the model knows it."""

    item: str
    title: str


class SearchResult(BaseModel):
    """Items that match a search."""

    items: list[Titled]


class Question(Body):
    """A history and an item whose score is to be explained."""

    history: list[Item] = Field(max_length=MAX_HISTORY, description="item ids, oldest first")
    item: Item
    user: User | None = None
    times: Times | None = None
    at: At | None = None
    by: By | None = Field(None, description="version to explain; if absent, the one that answers the user")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.request()
        return self

    def request(self) -> Request:
        """Return the request for the recommender whose answer is explained."""
        return Request(history=self.history, user=self.user, times=self.times, at=self.at)


class Explanation(BaseModel):
    """How much the item's score drops without each event of the history."""

    drops: list[float]


def _has_happened(at: float) -> float:
    if at > time.time() + AHEAD_S:
        raise ValueError("the time is more than a day in the future; give seconds since 1970, UTC, not milliseconds")
    return at


def _is_own(event_id: str) -> str:
    if event_id.lower().startswith(IMPORTED):
        raise ValueError(f"ids that begin with {IMPORTED} are those of imported events; choose another one")
    return event_id


class UserEvent(Body):
    """Something that a user did with an item."""

    event_id: Annotated[Stored, AfterValidator(_is_own)] = Field(
        min_length=1,
        description="an id of your choice, without `import:` in front; a second event with the same id is ignored",
    )
    user: Annotated[Stored, Trimmed, AfterValidator(_is_id)]
    item: Annotated[Stored, Trimmed, AfterValidator(_is_id)]
    kind: Literal["view", "buy", "hide"] = Field(
        "view", description="`hide`: do not recommend this item to the user again"
    )
    at: Annotated[FiniteFloat, Field(ge=EARLIEST), AfterValidator(_has_happened)] | None = Field(
        None, description="seconds since 1970, UTC, not before 1990 and at most a day in the future; if absent, now"
    )
    recommendation_id: Stored | None = Field(None, description="id of the answer that showed the item")


class Events(Body):
    """Several events, in the order in which they happened."""

    events: list[UserEvent] = Field(max_length=MAX_BATCH)


class Taken(BaseModel):
    """How many events were stored."""

    stored: int
    known: int = Field(description="number of events left out because their id was already stored")


class Forgotten(BaseModel):
    """How many rows were deleted."""

    events: int
    answers: int


class Share(Body):
    """The share of users whom the candidate answers."""

    share: float = Field(
        ge=0, le=1, description="share of the users; those who have the candidate keep it when the share grows"
    )


class ClickThrough(BaseModel):
    """How often an answer of a version led to a view or a purchase."""

    version: str
    users: int
    answers: int
    rate: float | None = Field(description="share of the answers; null if there are none")


class Experiment(BaseModel):
    """Two versions side by side."""

    share: float
    champion: ClickThrough
    candidate: ClickThrough
    difference: float | None = Field(
        description="rate of the candidate minus rate of the champion; null if either has too few users"
    )
    low: float | None = Field(description="lower end of the 95 % interval")
    high: float | None


class Readiness(BaseModel):
    """Whether the service can answer requests."""

    ready: bool


class State(BaseModel):
    """What is being served."""

    status: str = Field(
        description="ok; `waiting`: there is no champion yet; `behind`: a newer champion could not be loaded"
    )
    model: str = ""
    version: str = ""
    items: int = 0
    users: int = 0
    candidate: str = Field("", description="version of the candidate; empty if there is none")
    problem: str = Field(description="why a newer champion is not served; empty if all is well")


class Tensor(BaseModel):
    """A tensor of the open inference protocol, its elements nested by its shape, or in one list in the same order."""

    name: str
    datatype: str
    shape: Annotated[list[Annotated[int, Field(ge=0, le=MAX_HISTORY)]], Field(max_length=2)]
    data: list[Any]


class TextTensor(Tensor):
    """A tensor of ids."""

    datatype: Literal["BYTES"]
    data: list[Id] | list[list[Id]]


class InferenceParameters(BaseModel):
    """The options of a request; those of other servers are left aside."""

    k: int = Field(10, ge=1, le=MAX_ITEMS, description="number of items")


class Inference(BaseModel):
    """A request of the open inference protocol for recommendations."""

    id: Text | None = None
    parameters: InferenceParameters = InferenceParameters(k=10)
    inputs: Annotated[list[TextTensor], Field(max_length=10, description="`history`, and `user` if you like")]


class Inferred(BaseModel):
    """Recommendations as tensors."""

    model_name: str
    model_version: str
    id: str | None
    outputs: list[Tensor]
