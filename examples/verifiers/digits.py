"""A taskset of verifiers: the model repeats a digit, in two turns if it does not at first.

pip install verifiers uv   # in a virtual environment of its own: PYTHON is its interpreter
distflow run examples/verifiers/grpo.yaml environment.python=PYTHON
"""

from typing import Any

import verifiers.v1 as vf


class DigitData(vf.TaskData):
    answer: str


class DigitTask(vf.Task[DigitData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class Digits(vf.Taskset[DigitTask, vf.TasksetConfig]):
    def load(self) -> list[DigitTask]:
        data = [DigitData(idx=i, prompt=f"say {i}: ", answer=str(i)) for i in range(10)]
        return [DigitTask(d, self.config.task) for d in data]


class DigitsEnv(vf.SingleAgentEnv):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated and segment.last_reply.strip() != task.data.answer:
                await interaction.turn(" no, again: ")


__all__ = ["Digits", "DigitsEnv"]
