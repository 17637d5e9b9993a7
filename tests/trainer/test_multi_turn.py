"""Responses of several turns: the exact tokens, masks with holes, limits, and the place of replies in them."""

from __future__ import annotations

import torch

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.local import LocalWorkerGroup
from mcontroller.ray.class_with_init import ClassWithInitArgs
from trainer.rollout.episodes import Episodes
from trainer.rollout.trajectory import Trajectory
from workers.role_worker import RoleWorker

PAD, EOS, CALL = 0, 1, 2
PROMPT, RESPONSE = 4, 10
PROMPTS = [[11, 12, 13], [21]]
FAILURES = ("failed", "raised", "timed_out", "died", "invalid", "restarted")


class Policy(RoleWorker):
    """Continues every context with the tokens of a script, and keeps the contexts that it was asked for.

    Args:
        script: the next tokens by the tokens of the context.
    """

    def __init__(self, script):
        self.script, self.contexts, self.calls = script, [], 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generation_limits(self):
        return {"prompt_length": PROMPT, "response_length": RESPONSE, "vocab_size": 100, "max_rows": 256, "n": 1} | {
            "temperature": 0.7
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sampling_state(self):
        return {"sampled_batches": self.calls}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def restore_sampling(self, state):
        self.calls = state["sampled_batches"]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, changes_rows=True)
    def generate_sequences(self, prompts):
        meta = prompts.meta_info
        longest = meta["response_length"]
        ids, attention = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        responses = torch.full((len(prompts), longest), PAD)
        mask, log_probs = torch.zeros_like(responses), torch.zeros(responses.shape)
        for row in range(len(prompts)):
            context = ids[row][attention[row] == 1].tolist()
            assert attention[row].tolist() == sorted(attention[row].tolist()), "padded on the left"
            turn = self.script[tuple(context)][:longest]
            assert not set(turn[:-1]) & set(meta["eos_token_id"]), "a turn ends at the first stop token"
            self.contexts.append(context)
            responses[row, : len(turn)] = torch.tensor(turn)
            mask[row, : len(turn)] = 1
            log_probs[row, : len(turn)] = -torch.tensor(turn) / 100.0
        assert ids.shape[1] + longest <= PROMPT + RESPONSE
        made = {"prompts": ids, "responses": responses, "response_mask": mask, "rollout_log_probs": log_probs}
        return DataProto.from_dict({**made, "policy_version": torch.full((len(prompts),), 7)}, meta_info=meta)


class Echo:
    """An episode with replies of two tokens: 90, and 50 plus the number of the turn. Keeps what it replied to."""

    def __init__(self):
        self.replied_to = []

    async def __call__(self, rollout, problem):
        made = await rollout.submit(problem["prompt_ids"], stop_token_ids=(CALL,))
        while made.ended == "turn" and len(made.tokens) + 2 < RESPONSE:
            self.replied_to.append((made.last_turn, problem["answer"]))
            made.replied([90, 50 + made.turns])
            made = await rollout.submit(made, stop_token_ids=(CALL,))
        return made


def problems(n=1):
    ids = torch.tensor([[PAD] * (PROMPT - len(prompt)) + prompt for prompt in PROMPTS])
    batch = DataProto.from_dict({"input_ids": ids, "attention_mask": (ids != PAD).long()}, {"answer": ["a", "b"]})
    batch.meta_info = {"eos_token_id": EOS, "pad_token_id": PAD, "n": n}
    return batch


def run(script, n=1, batch=None):
    batch, echo = problems(n) if batch is None else batch, Echo()
    init = ClassWithInitArgs(Policy, {tuple(context): turn for context, turn in script})
    group = LocalWorkerGroup(init, name_prefix="policy")
    return Episodes(echo, processes=0)(batch, group.generate_sequences), group.workers[0], echo


FIRST, SECOND = PROMPTS
TWO_CALLS = [
    (FIRST, [31, CALL]),
    ([*FIRST, 31, CALL, 90, 51], [32, 33, CALL]),
    ([*FIRST, 31, CALL, 90, 51, 32, 33, CALL, 90, 52], [EOS]),
    (SECOND, [41, EOS]),
]


def test_the_mask_has_holes_exactly_at_the_tokens_of_replies():
    batch, _, echo = run(TWO_CALLS)
    assert batch.batch["responses"].tolist() == [
        [31, CALL, 90, 51, 32, 33, CALL, 90, 52, EOS],
        [41, EOS, *[PAD] * 8],
    ]
    mask = [[1, 1, 0, 0, 1, 1, 1, 0, 0, 1], [1, 1, *[0] * 8]]
    assert batch.batch["response_mask"].tolist() == mask
    attended = batch.batch["attention_mask"]
    assert attended.tolist() == [[0, 1, 1, 1, *[1] * 10], [0, 0, 0, 1, 1, 1, *[0] * 8]]
    sampled = -batch.batch["responses"] / 100 * torch.tensor(mask)
    torch.testing.assert_close(batch.batch["rollout_log_probs"], sampled)
    assert (
        batch.batch["input_ids"].tolist()
        == torch.cat((problems().batch["input_ids"], batch.batch["responses"]), 1).tolist()
    )
    assert batch.batch["policy_version"].tolist() == [7, 7]
    assert batch.batch["truncated"].tolist() == [False, False]
    assert echo.replied_to == [([31, CALL], "a"), ([32, 33, CALL], "a")]


def test_every_turn_continues_the_exact_tokens_so_far():
    _, policy, _ = run(TWO_CALLS)
    assert policy.contexts == [FIRST, SECOND, TWO_CALLS[1][0], TWO_CALLS[2][0]]


def test_the_batch_has_the_settings_of_the_problems_and_numbers_of_turns():
    batch, _, _ = run(TWO_CALLS)
    assert batch.meta_info["eos_token_id"] == EOS
    assert (batch.meta_info["n"], batch.meta_info["temperature"]) == (1, 0.7)
    assert batch.meta_info["metrics"] == {
        "multi_turn/turns_mean": 2.0,
        "multi_turn/turns_max": 3.0,
        "multi_turn/reply_tokens_mean": 2.0,
        "episodes/replaced_processes": 0.0,
        **dict.fromkeys(map("episodes/{}".format, FAILURES), 0.0),
    }


def test_responses_to_one_prompt_are_neighbors_and_go_on_on_their_own():
    batch, _, echo = run(TWO_CALLS, n=2)
    assert batch.batch["responses"][:, 0].tolist() == [31, 31, 41, 41]
    assert echo.replied_to == [([31, CALL], "a")] * 2 + [([32, 33, CALL], "a")] * 2 and batch.meta_info["n"] == 2


def test_all_turns_together_are_at_most_as_long_as_a_response():
    context = [*FIRST, 31, CALL, 90, 51]
    batch, _, _ = run([(FIRST, [31, CALL]), (context, [*range(60, 70)]), (SECOND, [EOS])])
    assert batch.batch["responses"][0].tolist() == [31, CALL, 90, 51, *range(60, 66)]
    assert batch.batch["truncated"].tolist() == [True, False]


def test_a_turn_without_room_beside_another_goes_on_in_the_next_call():
    """A prompt of the full length after a long first turn leaves 2 tokens to a call; the other response needs 4."""
    wide = [11, 12, 13, 14]
    script = [
        (wide, [31, 32, 33, 34, 35, CALL]),
        ([*wide, 31, 32, 33, 34, 35, CALL, 90, 51], [36, EOS]),
        (SECOND, [41, CALL]),
        ([*SECOND, 41, CALL, 90, 51], [42, 43, 44, EOS]),
        ([*SECOND, 41, CALL, 90, 51, 42, 43], [44, EOS]),
    ]
    batch = problems()
    batch.batch["input_ids"][0], batch.batch["attention_mask"][0] = torch.tensor(wide), 1
    rows, _, _ = run(script, batch=batch)
    assert rows.batch["responses"].tolist() == [
        [31, 32, 33, 34, 35, CALL, 90, 51, 36, EOS],
        [41, CALL, 90, 51, 42, 43, 44, EOS, PAD, PAD],
    ]
    assert rows.batch["response_mask"][1].tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 0, 0]
    assert rows.meta_info["metrics"]["multi_turn/turns_max"] == 2.0
    assert rows.batch["truncated"].tolist() == [False, False]


def test_a_conversation_knows_its_last_turn():
    conversation = Trajectory([11])
    conversation.sampled([31, CALL], [-1.0, -2.0])
    conversation.replied([90])
    conversation.sampled([32], [-3.0])
    assert conversation.last_turn == [32] and conversation.turns == 2
    assert conversation.mask.tolist() == [1, 1, 0, 1] and conversation.log_probs.tolist() == [-1.0, -2.0, 0.0, -3.0]
