"""On-policy distillation: the student samples, and the teacher scores every token (MiniLLM, arXiv:2306.08543).

The loss is the reverse KL of the student to the teacher on responses of the student. Its policy gradient has an
advantage for every token: ``log teacher - log student``, with a discount of 0. With ``TOP_K``, it is the KL of the
teacher to the student over the teacher's ``TOP_K`` most likely tokens (GKD, arXiv:2306.13649), which are found where
the teacher's shards are.

python -m examples.loops.distillation
"""

from __future__ import annotations

from typing import Any

from examples.loops.task import actor_config, local, problems, responses, right_answers, scores
from mcontroller import DataProto
from trainer import supervised_rows
from workers import DISTILLATION

START = local  # on Ray: on_ray of examples.loops.task
STEPS, PROMPTS, N = 40, 16, 8
TOP_K = 0  # up to the size of the vocabulary; 0: the sampled tokens only


def trained_teacher() -> Any:
    """Return a teacher that has learned the task from demonstrations."""
    teacher = START(actor_config(ppo_micro_batch_size=64), "actor")
    teacher.init_model()
    for step in range(40):
        prompts = problems(64, seed=1000 + step)
        teacher.update_sft(supervised_rows(responses(prompts, right_answers(prompts))))
    return teacher


def main() -> list[tuple[float, float]]:
    """Train the student, and return the reverse KL per token and the mean score of every step."""
    teacher = trained_teacher()
    config = actor_config(
        model={"seed": 1},
        rollout={"n": N},
        policy_loss="gpg",  # -advantage * log student
        ppo_mini_batch_size=PROMPTS * N,
        ppo_micro_batch_size=PROMPTS * N,
    )
    student = START(config, "actor_rollout")
    student.init_model()
    history = []
    for step in range(STEPS):
        batch = student.generate_sequences(problems(PROMPTS, seed=step))
        of_teacher = teacher.compute_log_prob(batch).batch["old_log_probs"]
        advantages = (of_teacher - batch.batch["rollout_log_probs"]) * batch.batch["response_mask"]

        kl = -float(advantages.sum() / batch.batch["response_mask"].sum())
        history.append((kl, float(scores(batch).mean())))
        if TOP_K:
            student.forward_backward(batch.union(teacher.compute_top_log_probs(batch, TOP_K)), loss=DISTILLATION)
            student.optim_step()
        else:
            student.update_actor(batch.union(DataProto.from_dict({"advantages": advantages})))
        print(f"step {step}: reverse KL {kl:.3f}, score {history[-1][1]:.3f}")
    return history


if __name__ == "__main__":
    main()
