"""State of one request in the scheduler."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from meshwright.serving.admission import AnswerLengthRatio
from meshwright.serving.blocks import HashChain
from meshwright.serving.logit_rows import Draw, LogitRow
from meshwright.serving.request import FinishReason, Request
from meshwright.serving.sampling import InvalidLogits, TokenCounts, TokenResult, prepare_draw, sample, score_token
from meshwright.spec.block_tables import count_blocks, max_blocks_held


class Sequence:
    """State of one request in the scheduler. windows: sliding window of each block table in tokens, None: no window.
    token_budget: maximum number of tokens of a step.

    Attributes:
        request: The request.
        tokens: Token IDs of the prompt and of the answer so far.
        computed: Number of tokens whose keys and values are in the KV cache.
        in_flight: Number of scheduled batches with its tokens that have not been recorded.
        paused: True if it keeps its KV blocks until more can be allocated safely.
        age: Serial number of its admission, from 0: a larger number means a younger sequence. -1 before admission.
        admitted: Time of its admission in seconds of `time.perf_counter`; 0 before.
        tables: Its block tables: each has the indices of its KV blocks so far, one per 16 positions; 0 where a block
            has been released.
        released: For each block table, number of its first KV blocks that have been released.
        scores_prompt: True if the prompt's log-probabilities are requested; False for a request that runs again after a
            lost rank, since the log-probabilities were sent before.
    """

    def __init__(self, request: Request, windows: SequenceOf[int | None], token_budget: int) -> None:
        """Create the state of a request that waits for admission; arguments: see the class."""
        self.request = request
        self.tokens = array("i", (*request.tokens, *request.replayed))
        self.computed = self.cached_tokens = 0
        self.tables, self.released = [array("i") for _ in windows], [0 for _ in windows]
        self.chain = HashChain(salt=request.cache_salt)
        # The last token of the answer is never computed.
        longest = max(request.max_total_tokens - 1, len(request.tokens))
        self.total_blocks = count_blocks(longest)
        self.most_blocks = max_blocks_held(longest, windows, min(token_budget, len(self.tokens)))
        self.age = self.group = self.place = -1
        self.in_flight, self.paused = 0, False
        self.admitted = 0.0
        self.finish_reason: FinishReason | None = None
        self.prompt_results: list[TokenResult | None] = [None]
        self.scores_prompt = request.sampling.prompt_logprobs is not None and not request.replayed
        self.counts = TokenCounts(request.tokens, request.replayed) if request.sampling.penalizes else None

    def expect_growth(self, answers: AnswerLengthRatio) -> int:
        """Return the predicted number of KV blocks that the sequence will still allocate. answers: predictor of answer
        lengths."""
        answer = answers.predict_length(self.answered, self.request.sampling.max_tokens)
        blocks = count_blocks(len(self.request.tokens) + answer)
        limits = zip(self.most_blocks, self.released, strict=True)
        return sum(max(0, min(blocks, most) - (self.blocks - released)) for most, released in limits)

    @property
    def blocks(self) -> int:
        """Number of KV blocks that each of its block tables has had so far, released blocks included."""
        return len(self.tables[0])

    @property
    def answered(self) -> int:
        """Number of tokens of the answer so far. Tokens that were generated before a lost rank was restarted
        (`Request.replayed`) are included."""
        return len(self.tokens) - len(self.request.tokens)

    def make_chunk(self, count: int) -> Chunk:
        """Return the chunk of the next `count` tokens, for a step."""
        begin, end = self.computed, self.computed + count
        ends = end == len(self.tokens)
        first = begin if self.scores_prompt and begin < len(self.request.tokens) else end - ends
        return Chunk(self, range(begin, end), range(first, end - (ends and not self.request.sampling.max_tokens)))

    def prepare_draw(self, position: int) -> Draw:
        """Return the sampling inputs (`Draw`) for the logits at `position`. With these inputs a GPU samples a token
        itself, or summarizes the logits for `sample_row`. position: index in the sequence; it may be the index of the
        next token, which is not sampled yet."""
        request, beyond = self.request, position - (len(self.tokens) - 1)
        if beyond >= 0:
            return prepare_draw(request.sampling, choice=request.choice, position=self.answered + beyond)
        return Draw(target=self.tokens[position + 1], ranked=request.sampling.prompt_logprobs or 0)

    def sample_row(self, row: LogitRow, position: int) -> TokenResult:
        """Return the token result for `row`, the logits at a position of the sequence. If the position is the
        sequence's last token, a new token is sampled. At an earlier position the result is the prompt's next token with
        its log-probability. The result's token is -1 if logits are NaN or infinite, or if the sequence has already
        ended.

        position: index in the sequence."""
        sampling = self.request.sampling
        if self.finish_reason is not None:
            return TokenResult(-1)
        try:
            if position == len(self.tokens) - 1:
                return sample(row, sampling, choice=self.request.choice, position=self.answered, counts=self.counts)
            return score_token(row, self.tokens[position + 1], sampling.prompt_logprobs or 0)
        except InvalidLogits:
            return TokenResult(-1)


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence that a step computes.

    Attributes:
        sequence: State of the sequence.
        positions: Positions of the tokens in the sequence.
        output_positions: Those of them whose logits are wanted; may be empty.
    """

    sequence: Sequence
    positions: range
    output_positions: range
