"""What the service reads and answers, as pydantic models: the published OpenAPI comes from these."""

from __future__ import annotations

import time
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from seqrec.serving.events import UserHistory
from seqrec.serving.recommender import Request
from seqrec.serving.rules import NumberRange

MAX_HISTORY = 10_000  # events of a history; a body is held in memory
MAX_ALLOWED = 100_000  # ids of a list of what is available
MAX_BATCH = 1_000  # requests, or events, that are sent together
MAX_VALUES = 1_000  # values of an attribute in a filter
MAX_FACTORS = 50  # values of an attribute that are boosted, or have a quota
MAX_ITEMS = 1_000  # items of a list
MAX_NEW_ITEMS, MAX_ATTRIBUTES = 100, 20  # items that a request describes, and attributes of each
AHEAD_S = 86_400.0  # seconds by which the clock of a sender may be ahead

By = Literal["champion", "candidate"]  # the model that is to answer
Factor = Annotated[float, Field(gt=0, le=1e6)]
Id = Annotated[str, Field(max_length=1_000)]
Text = Annotated[str, Field(max_length=4_000)]
Stored = Annotated[str, Field(max_length=500, pattern=r"^[^\x00]*$")]  # PostgreSQL indexes 2,700 bytes, and no NUL


class Body(BaseModel):
    """What is sent to the service; a field that it does not know is an error."""

    model_config = ConfigDict(extra="forbid")


class Query(Body):
    """Somebody's history, and what is wanted; every id is the data source's own."""

    history: list[Id] | None = Field(
        None,
        max_length=MAX_HISTORY,
        description="item ids, oldest first; absent = what the store of events knows of the user",
        examples=[["50", "181"]],
    )
    k: int = Field(10, ge=1, le=MAX_ITEMS, description="items wanted; there are fewer where the catalogue has no more")
    exclude: list[Id] = Field(default_factory=list, max_length=MAX_HISTORY, description="item ids not to show")
    allow: list[Id] | None = Field(None, max_length=MAX_ALLOWED, description="the only item ids to show; absent = all")
    filter: dict[Id, Annotated[list[Id], Field(max_length=MAX_VALUES)] | NumberRange] = Field(
        default_factory=dict,
        max_length=MAX_ATTRIBUTES,
        description="attribute -> values, of which an item needs one, or a range of numbers; all attributes must fit",
        examples=[{"genres": ["Comedy", "Drama"], "year": {"min": 1990}}],
    )
    boost: dict[Id, Annotated[dict[Id, Factor], Field(max_length=MAX_FACTORS)]] = Field(
        default_factory=dict,
        max_length=MAX_ATTRIBUTES,
        description="attribute -> value -> how many times as likely the model is to hold its items",
        examples=[{"genres": {"Drama": 2, "Horror": 0.5}}],
    )
    quota: dict[Id, Annotated[dict[Id, Annotated[int, Field(ge=0)]], Field(max_length=MAX_FACTORS)]] = Field(
        default_factory=dict,
        max_length=MAX_ATTRIBUTES,
        description="attribute -> value -> items of the list that may have it",
        examples=[{"genres": {"Comedy": 3}}],
    )
    diversity: float = Field(0.0, ge=0, le=1, description="0 = the best items, up to 1 = items that differ most")
    explore: float = Field(0.0, ge=0, le=1, description="probability that a position shows a random candidate")
    user: Id | None = Field(None, description="user id; an unknown one is fine")
    times: list[FiniteFloat] | None = Field(None, description="seconds UTC, one an event of the history")
    items_text: dict[Id, Annotated[dict[Id, Text], Field(max_length=MAX_ATTRIBUTES)]] = Field(
        default_factory=dict,
        max_length=MAX_NEW_ITEMS,
        description="items that the model never saw: id -> attributes; candidates, also in the history; Recformer only",
        examples=[{"new": {"title": "A film of tomorrow"}}],
    )

    titles: bool = Field(False, description="answer with the titles of the items too")
    by: By | None = Field(None, description="version that is to answer, whoever the user is; the store does not see it")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.history is None and (self.user is None or self.times is not None):
            raise ValueError("history: missing; give a history, or a user without times")
        self.request(UserHistory())
        return self

    def request(self, known: UserHistory) -> Request:
        """Return what the recommender understands; what is `known` stands in for a history that is missing."""
        fields = {name: value for name, value in vars(self).items() if name not in ("titles", "by")}
        if self.history is None:
            fields |= {"history": known.items, "times": known.times, "exclude": [*self.exclude, *known.hidden]}
        return Request(**fields)


class Queries(Body):
    """Several at once."""

    requests: list[Query] = Field(max_length=MAX_BATCH)


class Recommendation(BaseModel):
    """The best items, and what was done to give any."""

    items: list[str] = Field(description="best first")
    titles: list[str] | None = Field(None, description="of the items, if requested; empty where the model has none")
    scores: list[float]
    source: str = Field(description="the model, or popularity where no item of the history is known")
    unknown: int = Field(description="events of the history that the model does not know")
    notes: list[str]
    version: str = Field(description="of the model in the registry")
    recommendation_id: str = Field(description="to be sent with the events that this answer leads to")


class Recommendations(BaseModel):
    """Several at once, in the order of the requests."""

    answers: list[Recommendation]


class Listing(BaseModel):
    """Items, best first, that are nobody's in particular."""

    items: list[str]
    titles: list[str] = Field(description="empty where the model has none")
    scores: list[float]
    version: str = Field(description="of the model in the registry")


class History(BaseModel):
    """What a user did, by the store of events."""

    items: list[str] = Field(description="oldest first")
    titles: list[str] = Field(description="empty where the model has none")


class Titled(BaseModel):
    """An item, and its title as the model knows it."""

    item: str
    title: str


class SearchResult(BaseModel):
    """Items that fit a search."""

    items: list[Titled]


class Question(Body):
    """Why an item is recommended after a history."""

    history: list[Id] = Field(max_length=MAX_HISTORY, description="item ids, oldest first")
    item: Id
    user: Id | None = None
    by: By = "champion"


class Explanation(BaseModel):
    """What each event of the history adds to the item's score: by how much it drops without the event."""

    drops: list[float]


def _has_happened(at: float) -> float:
    if at > time.time() + AHEAD_S:
        raise ValueError("more than a day in the future; seconds since 1970, UTC, expected, not milliseconds")
    return at


class UserEvent(Body):
    """Something that a user did with an item."""

    event_id: Stored = Field(min_length=1, description="yours; a second event with this id is ignored")
    user: Stored = Field(min_length=1)
    item: Stored = Field(min_length=1)
    kind: Literal["view", "buy", "hide"] = Field("view", description="hide: not to be recommended any more")
    at: Annotated[FiniteFloat, Field(ge=0), AfterValidator(_has_happened)] | None = Field(
        None, description="seconds UTC, since 1970 and at most a day ahead; absent = now"
    )
    recommendation_id: Stored | None = Field(None, description="of the answer that showed the item")


class Events(Body):
    """Several events, in the order in which they happened."""

    events: list[UserEvent] = Field(max_length=MAX_BATCH)


class Taken(BaseModel):
    """What became of the events."""

    stored: int
    known: int = Field(description="left out, because an event with this id is there already")


class Forgotten(BaseModel):
    """How many rows were deleted."""

    events: int
    answers: int


class Share(Body):
    """How many users the candidate answers."""

    share: float = Field(ge=0, le=1, description="of the users; who has the candidate keeps it when the share grows")


class ClickThrough(BaseModel):
    """How often an answer of a version led to a view or a purchase."""

    version: str
    users: int
    answers: int
    rate: float | None = Field(description="of the answers; null where there are none")


class Experiment(BaseModel):
    """Two versions side by side."""

    share: float
    champion: ClickThrough
    candidate: ClickThrough
    difference: float | None = Field(description="candidate less champion; null where one has too few users")
    low: float | None = Field(description="lower end of the 95 % interval")
    high: float | None


class Readiness(BaseModel):
    """Whether to send requests here."""

    ready: bool


class State(BaseModel):
    """What is being served."""

    status: str = Field(description="ok; waiting for a first champion; or behind: it cannot follow the registry")
    model: str = ""
    version: str = ""
    items: int = 0
    users: int = 0
    candidate: str = Field("", description="version of the second model; empty where there is none")
    problem: str = Field(description="why a newer champion is not served; empty where nothing is wrong")
