"""Plain transformers, in one piece and with no code of ours: what the whole stack must equal in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """A greedy continuation and the log-probability of each of its tokens."""

    token_ids: list[int]
    logprobs: list[float]


class PlainModel:
    """One model in fp32."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def speak(self, prompt: Sequence[int], count: int) -> PlainAnswer:
        """Continue greedily by ``count`` tokens, end tokens ignored."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        step, read = torch.tensor([list(prompt)]), 0
        answer = PlainAnswer([], [])
        with torch.inference_mode():
            for _ in range(count):
                # As generate() does it; left out, bamba would count from 0 at every call.
                positions = torch.arange(read, read + step.shape[1])[None]
                read += step.shape[1]
                logits = self._model(
                    input_ids=step, position_ids=positions, past_key_values=cache, logits_to_keep=1
                ).logits[0, -1]
                chosen = int(logits.argmax())
                answer.token_ids.append(chosen)
                answer.logprobs.append(float(logits.log_softmax(-1)[chosen]))
                step = torch.tensor([[chosen]])
        return answer
