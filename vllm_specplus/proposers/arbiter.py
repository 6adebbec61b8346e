"""Chooses each request's drafts by what they earn: which source, how many drafts, how many passes of the draft model.

Every source offers each request a chain of tokens. The draft model offers its drafts, a matcher what followed an
earlier place, a request's reference what stands at its cursor. A matcher also offers a chain behind each number of the
model's drafts. After a step its tokens are known, and every offer is judged by them, the unused ones too. So the
chances of drafts are learned without trying anything out.

A chain earns the tokens that it is expected to bring, less the price of its slots. The price of a slot is what the time
that it takes would bring otherwise: tokens per second times seconds a slot. The best chain wins, cut where what follows
is not worth its slots. No drafts may win. Where a request is alone, each number of drafts has a price of its own.

The chance of a draft is looked up by what is known of it before it is verified:

===========  ==========================================================================================
key          the draft
===========  ==========================================================================================
`ALONE`      the model's, at a place where no chain speaks; by its place
`AGREED`     the model's and a chain's; by the tokens that agreed before it
`DIFFERED`   the model's, where the chains say otherwise; by the tokens that agreed for them
`CONTRARY`   a chain's, where the model says otherwise; by its source and the tokens that agreed before it
`COPIED`     a chain's, where the model says nothing; by its source and the tokens that agreed before it
===========  ==========================================================================================

A chain's first token is judged under `COPIED` too, whatever the model says. So a source is known as well while the
model is awake. Few texts have many `CONTRARY` drafts. So what `COPIED` and `ALONE` at its first place tell of one
counts as some trials of it.

An agreement grows by one with each token of a chain, so one table serves first and later tokens. That of a reference
which begins with the whole output is one of its own, however long the output is. All requests share the table, and the
older of its trials count less. Four misses in a row halve what was known: the source may have turned.

Chains that say the same may have other chances, since one knows more than the other: the better one counts. A reference
that the model agrees with counts at least as much as without the model.

Yet one text repeats itself less than another. So each request has a record of its own: how often each source was right
in it, and how often that was expected. Where it was right less often, its chances in this request are less by as much.
Where it was right more often, by more than luck may do, the chances of a miss are. The record begins as if six hits had
been expected and had come, and three misses. For a reference it is 24 hits: a client vouches for it. What is older
counts less.

Where the model and the chains differ, that text may side with either: a list counts on, and a copy does not. So each
source has a second record of these drafts alone. A text has few of them, so this record begins as if two hits had been
expected and had come, and two misses.

Where chains differ, at most one is right. So the chance of a token is that among the cases in which it and the best
other one are not both right. Chains know of each other, though: a copy that has gone on for long is seldom left for a
guess. So a third record says of each source how often it was right there, in all requests together. Where some of them
say what the model does and others do not, its draft has the best chance of these chains.

A text that follows its reference to the end usually ends there. So behind that end a chain that has said the same has
its own chance times that of the reference being wrong.

A token that ends the text needs no draft: without one the step would give it just as well. Nothing follows it. So each
chain ends before such a token. A request may name more of them than there is room for; then some are drafted.

Passes of the draft model are bought in the same way. What the k-th pass adds to the best chain's value is averaged, by
the agreement that speaks for the history. Where it adds less than it costs, it is left out, but for a step now and
then. That step comes the sooner the less is known of the pass. In between the text tells of the first pass left out. It
would have added something where all drafts of the passes before were right and no chain knew the next token: by its
chance a token, and what is drafted behind it now. That says nothing of slots which its draft would have saved. So it
counts where it is more than what the pass added when it was made. The first pass also fills the draft model's cache, so
a request needs it in every step, or never again. A request keeps an account of what the model has earned it. Once that
is spent, the request gives up the model for good. A common account, for each size of batch, says whether new requests
begin with the model. It earns a small share of all tokens, and with that the model is tried again from time to time.

Verification has a price of its own, beside the slots. Where the drafts of all requests together are worth less than
that, the step goes without drafts. A pass earns what it adds beyond that price. Where each step has drafts, nobody
knows the price. So now and then a step goes without.

All arithmetic is in integers, in units of 1 / `ONE` tokens. So every rank decides alike, and a kernel can be held to
these results bit for bit.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np

from vllm_specplus.proposers.history import History, StateRows
from vllm_specplus.sources import NGRAM, REFERENCE

_ALLOWANCE = 3.0  # steps' time that a request may lose by the model before it gives it up
_COMMON_ALLOWANCE = 4.0
_NEXT_ALLOWANCE = 1.5  # of a size of batch that has not been seen, where another one has
_LEAST_ALLOWANCE = 1.0  # with less a request would give a good model up by chance
_MOST_COMMON_CREDIT = 64.0  # of all requests of a batch together; `_COMMON_ALLOWANCE` for each of them, if more
_MOST_COMMON_DEBT = 16.0
_COMMON_SHARE_SHIFT = 5  # of the common credit, 1 / 32 comes to each request's allowance
_SIZE_PERIOD = 16  # steps
_INCOME_SHIFT = 7  # of each token's time, 1 / 128 pays for trying the model again
_FIRST_DRAFT = 3  # the column of a `Choice`
_FIRST_TRIAL_PERIOD, _TRIAL_PERIOD = 8, 64  # steps until what seems not to pay, or to pay little, is tried once more
# As in `_arbiter`, which imports numba. A test compares them.
_SHIFT = 16
_ONE = 1 << _SHIFT
ASLEEP = -1
"""The credit of a request that has given the draft model up."""
MAX_STOPS = 4
"""How many tokens that end its text are known of a request."""


@dataclass(frozen=True)
class Prices:
    """What a step's parts cost, in tokens: what their time would bring otherwise.

    slot: of one draft. first_pass, later_pass: of the draft model's passes, for the whole batch. step: a request's
    share of a step of the target. prompt_passes: what the model's passes over prompts have cost all requests since the
    last prices, in the time of their steps. verification: of verifying any drafts of the batch at all, beside their
    slots; None: a step without drafts is none the faster for that. more: what one draft, two drafts and so on of a
    request cost beside their slots. It may be less than nothing. The last one is that of larger numbers too.
    """

    slot: float
    step: float
    first_pass: float = 0.0
    later_pass: float = 0.0
    prompt_passes: float = 0.0
    verification: float | None = None
    more: tuple[float, ...] = ()

    def without_passes(self) -> Self:
        """The prices where all passes are made anyway, so that they cost nothing."""
        return replace(self, first_pass=0.0, later_pass=0.0, prompt_passes=0.0)


class ScaledPrices(NamedTuple):
    """Prices in units of 1 / `ONE` tokens.

    slot, step, verification: as in `Prices`; step > 0. passes: [S] int64, of each pass. more: int64.
    """

    slot: int
    step: int
    passes: np.ndarray
    verification: int | None
    more: np.ndarray

    @classmethod
    def of(cls, prices: Prices, num_model_steps: int) -> Self:
        """Scale prices, of which none counts as more than 2^20 tokens."""

        def scaled(price: float) -> int:
            return int(min(max(price, -(2.0**20)), 2.0**20) * _ONE)

        passes = [scaled(prices.first_pass), *[scaled(prices.later_pass)] * num_model_steps][:num_model_steps]
        verification = None if prices.verification is None else scaled(prices.verification)
        more = np.array([scaled(price) for price in prices.more], np.int64)
        return cls(scaled(prices.slot), max(scaled(prices.step), 1), np.array(passes, np.int64), verification, more)


class CommonAccount:
    """What the draft model has earned, in the time of a batch's steps; new requests begin with it or not.

    Batches of about the same size have an account: with one request the model may pay, and with sixteen not. The size
    is that of the largest batch of the last steps. So a batch that comes and goes in parts is of one size.
    """

    def __init__(self) -> None:
        self._num_reqs = 1
        self._credits: dict[int, int] = {}  # by size, in binary digits
        self._largest, self._largest_before = 0, 0  # requests of a batch of this period, and of the one before it
        self._num_steps = 0

    def add_tokens(self, num_tokens: int, num_reqs: int, step_price: int) -> None:
        """Add the share of a step's tokens that pays for trying the model again; `num_reqs` requests got the tokens.

        What is added until the next step is of as many requests.
        """
        if num_reqs == 0:
            return
        if self._num_steps % _SIZE_PERIOD == 0:
            self._largest_before, self._largest = self._largest, 0
        self._num_steps += 1
        self._largest, self._num_reqs = max(self._largest, num_reqs), num_reqs
        self.add((num_tokens << (2 * _SHIFT - _INCOME_SHIFT)) // step_price)

    def charge(self, prices: Prices) -> None:
        """Take away what the model's passes over prompts have cost."""
        self.add(-int(prices.prompt_passes * _ONE))

    def add(self, profit: int) -> None:
        """Add the profit of the model's passes in a step, over all requests of it."""
        if self._num_steps == 0:
            return
        most = max(int(_MOST_COMMON_CREDIT * _ONE) // self._num_reqs, int(_COMMON_ALLOWANCE * _ONE))
        least = -int(_MOST_COMMON_DEBT * _ONE)
        size = self._size(self._num_reqs)
        self._credits[size] = min(max(self._credit(size) + profit // self._num_reqs, least), most)

    def allowance(self, num_reqs: int) -> int:
        """The credit of a new request; `ASLEEP` where it begins without the model.

        It is about as much as there is in common, but not more than a few steps. Where the model pays in general, a
        request that it does not pay for keeps it for longer.

        Args:
            num_reqs: the requests of its batch.
        """
        credit = self._credit(self._size(num_reqs))
        if credit < int(_LEAST_ALLOWANCE * _ONE):
            return ASLEEP
        return min(credit, int(_ALLOWANCE * _ONE)) + (credit >> _COMMON_SHARE_SHIFT)

    def _size(self, num_reqs: int) -> int:
        return max(num_reqs, self._largest, self._largest_before, 1).bit_length()

    def _credit(self, size: int) -> int:
        """The credit of batches of a size. A new one has little, or the debt of a smaller one: there it pays sooner."""
        if size in self._credits:
            return self._credits[size]
        if not self._credits:
            return int(_COMMON_ALLOWANCE * _ONE)
        smaller = [self._credits[known] for known in sorted(self._credits) if known < size]
        return min([int(_NEXT_ALLOWANCE * _ONE), *smaller[-1:]])


@dataclass(frozen=True)
class Choice:
    """The drafts of one step.

    Attributes:
        table: [B, 3 + K] int64, of each request its number of drafts, `num_model`, `sources`, and the drafts. One array
            takes a call far less time than four.
    """

    table: np.ndarray

    @property
    def token_ids(self) -> np.ndarray:
        """[B, K] the drafts of each request; -1 after the last."""
        return self.table[:, _FIRST_DRAFT:]

    @property
    def num_drafts(self) -> np.ndarray:
        """[B] the drafts of each request."""
        return self.table[:, 0]

    @property
    def num_model(self) -> np.ndarray:
        """[B] how many leading drafts of each request are the draft model's."""
        return self.table[:, 1]

    @property
    def sources(self) -> np.ndarray:
        """[B] the source of the others; `UNFILLED` where there are none."""
        return self.table[:, 2]

    def to_lists(self) -> list[list[int]]:
        """The drafts as one list of token ids per request."""
        return [row[_FIRST_DRAFT : _FIRST_DRAFT + row[0]] for row in self.table.tolist()]

    def makers(self) -> list[tuple[int, int]]:
        """Of each request, how many leading drafts are the model's, and the source of the others."""
        return [(row[1], row[2]) for row in self.table.tolist()]


class Arbiter:
    """Chooses among what the draft model and the chains offer; learns while it runs.

    In each step: `begin_step`, then `offer` for each chain of start 0, `plan_passes`, the model's passes,
    `offer_model`, `offer` for the other chains, `choose`.

    Args:
        max_num_reqs: requests that have state at the same time.
        num_model_steps: S, the most passes of the draft model; 0 = there is none.
        num_speculative_tokens: K, the slots of a request, >= 1.
        sources: of each chain, its source: `NGRAM`, `SUFFIX` or `REFERENCE`, which is the last, and starts at 0.
        starts: of each chain, how many of the model's drafts it follows, 0 to S.
        is_blind: whether the model's drafts are sampled and verified by their distribution. The choice then uses only
            what was known before they were drawn, or verification would change the distribution of the text.
        stop_token_ids: by request, the tokens that end its text, the most likely ones first; read when it begins.
    """

    def __init__(
        self,
        max_num_reqs: int,
        *,
        num_model_steps: int,
        num_speculative_tokens: int,
        sources: Sequence[int],
        starts: Sequence[int],
        is_blind: bool = False,
        stop_token_ids: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        # numba, imported before a vLLM CPU worker has started, breaks that worker.
        from vllm_specplus.proposers import _arbiter

        self._compiled = _arbiter
        self.num_model_steps = num_model_steps
        self.num_speculative_tokens = num_speculative_tokens
        chances = prior_chances()
        new_hits, new_trials, misses = (np.zeros_like(chances) for _ in range(3))
        trials = np.full_like(chances, _arbiter.PRIOR_TRIALS)
        hits = chances * trials // _arbiter.ONE
        self.table = _arbiter.Table(new_hits, new_trials, hits, trials, misses, chances)
        num_chains = len(sources)
        self._offers = _arbiter.Offers(
            model=np.zeros((max_num_reqs, num_model_steps), np.int32),
            passes=np.zeros(max_num_reqs, np.int64),
            chains=np.zeros((max_num_reqs, num_chains, num_speculative_tokens), np.int32),
            lengths=np.zeros((max_num_reqs, num_chains), np.int32),
            agreed=np.zeros((max_num_reqs, num_chains), np.int32),
            starts=np.array(starts, np.int64),
            sources=np.array(sources, np.int64),
            stops=np.full((max_num_reqs, MAX_STOPS), _arbiter.NO_TOKEN, np.int32),
            limits=np.zeros(max_num_reqs, np.int64),
            is_blind=is_blind,
        )
        self._stop_token_ids = stop_token_ids
        self._record = _arbiter.Record(*np.zeros((3, max_num_reqs, _arbiter.NUM_RECORDS), np.int64))
        self._opposed = _arbiter.Record(*np.zeros((3, 1, _arbiter.NUM_RECORDS), np.int64))
        self._offer_positions = np.full(max_num_reqs, _arbiter.NO_OFFERS, np.int64)
        self._state_rows = StateRows(max_num_reqs)

        sums, gain_trials, told_sums, told_trials = np.zeros((4, _arbiter.NUM_LENGTHS, num_model_steps), np.int64)
        self._gains = _arbiter.Gains(
            sums, gain_trials, told_sums, told_trials, np.zeros(_arbiter.NUM_LENGTHS, np.int64)
        )
        self._foregone = _arbiter.Foregone(
            np.full(max_num_reqs, _arbiter.NO_PASS, np.int64), np.zeros(max_num_reqs, np.int64)
        )
        self._credits = np.zeros(max_num_reqs, np.int64)
        self._pass_prices = np.zeros(num_model_steps, np.int64)
        self._list_prices = _arbiter.ListPrices(
            np.zeros(num_speculative_tokens + 1, np.int64), np.zeros(num_speculative_tokens, np.int64)
        )
        self._state = _arbiter.to_addresses(
            self._offer_positions,
            self._credits,
            self._offers,
            self.table,
            self._record,
            self._opposed,
            self._gains,
            self._foregone,
            self._pass_prices,
            self._list_prices,
        )
        self._account = CommonAccount()
        self._prices: Prices | None = None
        # In a row: steps that had drafts, and those whose drafts were dropped.
        self._steps_with_drafts = self._steps_dropped = 0
        self._trial_period = _FIRST_TRIAL_PERIOD
        self.set_prices(Prices(0.0, 1.0))
        self._load_compiled()

    def _load_compiled(self) -> None:
        """Take a step without requests: to compile or to load a function takes longer than the steps to be timed."""
        nobody, nothing = np.zeros(0, np.int64), np.zeros(0, np.int32)
        self.begin_step(History([], np.zeros((0, 1), np.int32), nobody, nobody))
        self.offer(0, np.zeros((0, 1), np.int32), nothing, nothing)
        self._compiled.plan(self._state, nobody, nobody)
        self.offer_model(np.zeros((0, 1)), nobody)
        self.choose(nobody)

    @property
    def num_requests(self) -> int:
        """Requests that have state."""
        return len(self._state_rows)

    def set_prices(self, prices: Prices) -> None:
        """Set what slots and passes cost from now on; the same object again changes nothing."""
        if prices is self._prices:
            return
        self._prices = prices
        self._account.charge(prices)
        self._scaled = ScaledPrices.of(prices, self.num_model_steps)
        self._pass_prices[:] = self._scaled.passes
        self._compiled.set_list_prices(self._state, self._scaled.slot, self._scaled.more)

    def begin_step(self, history: History, without_drafts: Iterable[str] = ()) -> None:
        """Judge the last step's offers by the tokens that have come since, and make room for this step's.

        Args:
            history: the batch of B requests. A request that is not known yet begins with the draft model where that
                has paid lately.
            without_drafts: requests that never may have drafts, and so give the draft model up at once.

        Raises:
            RuntimeError: more requests have state than there is room for.
        """
        self._rows, new = self._state_rows.assign(history.req_ids)
        for req_id, row in new:
            self._begin_request(req_id, row)
        for req_id in without_drafts:
            if (idle := self._state_rows.find(req_id)) is not None:
                self._credits[idle] = ASLEEP
        self._num_tokens = np.ascontiguousarray(history.num_tokens, np.int64)
        num_new, self._is_anyone_awake = self._compiled.begin_step(
            self._state, history.token_ids, self._num_tokens, self._rows
        )
        self._account.add_tokens(num_new, len(self._rows), self._scaled.step)

    def offer(self, chain: int, token_ids: np.ndarray, lengths: np.ndarray, agreed: np.ndarray) -> None:
        """Offer a chain to each request.

        Args:
            chain: its index in `sources` and `starts`.
            token_ids: [B, <= K] int32; what stands behind a chain's end is not read.
            lengths: [B] int32, tokens of each request's chain; 0 = none.
            agreed: [B] int32, how many tokens before it agree, or `WHOLE_OUTPUT` and some; 0 = it is a guess.
        """
        self._compiled.offer(self._state, self._rows, chain, token_ids, lengths, agreed)

    def plan_passes(self, limits: np.ndarray) -> int:
        """How many passes of the draft model to make, for all requests of the batch; chains of start 0 are offered.

        Args:
            limits: [B] int64, the most drafts of each request.
        """
        if not self._is_anyone_awake:
            return 0
        return self._compiled.plan(self._state, self._rows, limits)

    def is_asleep(self, req_ids: Sequence[str]) -> bool:
        """Whether each of these requests has given the draft model up.

        A new one, if it would begin without the model in a step of them all. What changes until then, charges for
        passes over prompts, only takes from what it would begin with.
        """
        for req_id in req_ids:
            row = self._state_rows.find(req_id)
            credit = self._beginning_credit(len(req_ids)) if row is None else self._credits.item(row)
            if credit != ASLEEP:
                return False
        return True

    def offer_model(self, model_drafts: np.ndarray, limits: np.ndarray) -> None:
        """Offer the draft model's drafts to the requests that have not given it up.

        Args:
            model_drafts: [B, passes] int.
            limits: [B] int64, the most drafts of each request. One that may not draft is offered nothing: in its prompt
                the model has drafted tokens that are known.
        """
        drafts = np.ascontiguousarray(model_drafts, np.int32)
        self._compiled.offer_model(self._state, self._rows, limits, drafts)

    def choose(self, limits: np.ndarray) -> Choice:
        """Choose the drafts of each request among what was offered.

        Args:
            limits: [B] int64, the most drafts of each request; more than K count as K.
        """
        num_reqs = len(self._rows)
        table = np.empty((num_reqs, _FIRST_DRAFT + self.num_speculative_tokens), np.int64)
        profit, fate = self._compiled.choose_and_settle(
            self._state,
            self._num_tokens,
            self._rows,
            limits,
            self._scaled.slot,
            self._scaled.step,
            self._scaled.verification or 0,
            self._least_value(num_reqs),
            table,
        )
        self._account.add(profit)
        if fate == self._compiled.VERIFIED:
            self._steps_with_drafts, self._steps_dropped = self._steps_with_drafts + 1, 0
        elif fate == self._compiled.DROPPED:
            self._steps_with_drafts, self._steps_dropped = 0, self._steps_dropped + 1
            self._trial_period = min(2 * self._trial_period, _TRIAL_PERIOD)
        elif limits.any():
            # Where no draft was allowed, the text ends, and there is no next step to be timed.
            self._steps_with_drafts = 0
        return Choice(table)

    def _least_value(self, num_reqs: int) -> int:
        """What the drafts of a batch have to be worth together to be verified, in units of 1 / `ONE` tokens.

        Now and then drafts that are worth little are dropped, or verified, to learn what verification costs. Soon that
        is done for the first time, then not as often. Where none are worth little, others are dropped, but later.
        """
        least = self._scaled.verification
        if least is None or self._steps_dropped >= _TRIAL_PERIOD:
            return 0
        if self._steps_with_drafts < self._trial_period:
            return least
        steps = max(self._steps_with_drafts, 2 * self._trial_period)
        return max(least, num_reqs * self._scaled.step * steps // (4 * self._trial_period))

    def withdraw(self, req_ids: Iterable[str]) -> None:
        """Forget what was offered to these requests, unknown ones among them: their text is not what it was."""
        for req_id in req_ids:
            if (row := self._state_rows.find(req_id)) is not None:
                self._offer_positions[row] = self._compiled.NO_OFFERS
                self._set_stops(req_id, row)

    def retain(self, req_ids: Collection[str]) -> None:
        """Drop the state of every request that is not named."""
        self._state_rows.retain(req_ids)

    def _begin_request(self, req_id: str, row: int) -> None:
        self._offer_positions[row] = self._compiled.NO_OFFERS
        self._set_stops(req_id, row)
        for numbers in self._record:
            numbers[row] = 0
        self._credits[row] = self._beginning_credit(len(self._rows))

    def _set_stops(self, req_id: str, row: int) -> None:
        token_ids = self._stop_token_ids.get(req_id, ())[:MAX_STOPS]
        stops = self._offers.stops[row]
        stops[: len(token_ids)], stops[len(token_ids) :] = token_ids, self._compiled.NO_TOKEN

    def _beginning_credit(self, num_reqs: int) -> int:
        return self._account.allowance(num_reqs) if self.num_model_steps else ASLEEP


def prior_chances() -> np.ndarray:
    """[NUM_KEYS] int64: the chances of each key before anything is known.

    Those of `CONTRARY` are mixed with what others tell of them before they are used.
    """
    # Only now, as in `Arbiter`.
    from vllm_specplus.proposers import _arbiter

    # The last class, the whole output, begins as the longest agreement does.
    lengths = np.minimum(np.arange(_arbiter.NUM_LENGTHS), _arbiter.NUM_LENGTHS - 2)
    chances = np.empty(_arbiter.NUM_KEYS)
    chances[_arbiter.ALONE : _arbiter.AGREED] = 0.5
    chances[_arbiter.AGREED : _arbiter.DIFFERED] = np.minimum(0.6 + 0.05 * lengths, 0.95)
    chances[_arbiter.DIFFERED : _arbiter.CONTRARY] = np.maximum(0.5 - 0.03 * lengths, 0.2)
    copied = np.minimum(0.3 + 0.08 * lengths, 0.9)
    chances[_arbiter.CONTRARY : _arbiter.COPIED] = np.tile(0.6 * copied, _arbiter.NUM_SOURCES)
    chances[_arbiter.COPIED :] = np.tile(copied, _arbiter.NUM_SOURCES)
    # A client vouches for its reference.
    chances[_arbiter.COPIED + (REFERENCE - NGRAM) * _arbiter.NUM_LENGTHS :] = np.minimum(0.8 + 0.03 * lengths, 0.97)
    return (chances * _arbiter.ONE).astype(np.int64)
