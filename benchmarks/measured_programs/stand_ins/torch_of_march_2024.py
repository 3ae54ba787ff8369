"""Starts torchtrain's program of March 2024 with names that are gone: torch_of_march_2024.py now|then PROGRAM [...].

With "then", torch does what it did then too. See the notes in torchtrain_llama.py.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch._dynamo.config
import torch.utils.checkpoint
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.utils._config_module import Config, _ConfigEntry
from torch.utils.checkpoint import create_selective_checkpoint_contexts

WORDS = 32_000
FLAG = "_experimental_support_context_fn_in_torch_utils_checkpoint"


class SentencePieceProcessor:
    """Of as many words as Llama's; a text is its characters."""

    def __init__(self, model_file: str) -> None:
        """Of a file that is not read."""

    def vocab_size(self) -> int:
        """How many words it has."""
        return WORDS

    get_piece_size = vocab_size

    def bos_id(self) -> int:
        """Before a text."""
        return 1

    def eos_id(self) -> int:
        """After a text."""
        return 2

    def pad_id(self) -> int:
        """It has none."""
        return -1

    def encode(self, text: str) -> list[int]:
        """The words of a text."""
        return [3 + ord(character) % (WORDS - 3) for character in text]


class Texts:
    """Of one sentence, without end, as a data set of the package datasets is walked."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        """All texts."""
        while True:
            yield {"text": "the quick brown fox jumps over the lazy dog " * 50}


def texts_at(path: str) -> Texts:  # noqa: ARG001 - no file is read
    """Those of a folder."""
    return Texts()


def share(texts: Texts, rank: int, ranks: int) -> Texts:  # noqa: ARG001 - every rank has all
    """A rank's."""
    return texts


def make_up_packages() -> None:
    """The tokenizer's and the texts'."""
    sentencepiece, datasets, distributed = map(
        ModuleType, ("sentencepiece", "datasets", "datasets.distributed")
    )
    vars(sentencepiece)["SentencePieceProcessor"] = SentencePieceProcessor
    vars(datasets).update(load_dataset=None, load_from_disk=texts_at, distributed=distributed)
    vars(distributed)["split_dataset_by_node"] = share
    sys.modules.update({module.__name__: module for module in (sentencepiece, datasets, distributed)})


def give_old_names() -> None:
    """Those of torch that the program imports or sets."""

    def contexts(policy: Callable[..., bool]) -> Any:
        def as_now(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
            return policy("recompute" if context.is_recompute else "forward", operator, *args, **kwargs)

        return create_selective_checkpoint_contexts(as_now)

    vars(torch.utils.checkpoint)["_pt2_selective_checkpoint_context_fn_gen"] = contexts
    torch._dynamo.config._config[FLAG] = _ConfigEntry(Config(default=False), FLAG)


def reduce_in_its_stream() -> None:
    """Let FSDP2 allocate reduce-scatter's input in that collective's stream, and let go of it on return."""
    reduce, copy_in = _fsdp_param_group.foreach_reduce, _fsdp_collectives.foreach_reduce_scatter_copy_in
    callers: list[torch.cuda.Stream] = []

    def copy_in_and_wait(*args: Any) -> None:
        copy_in(*args)
        callers[-1].wait_stream(torch.cuda.current_stream())

    def reduced(params: Any, grads: Any, group: Any, stream: torch.cuda.Stream, *args: Any) -> Any:
        callers.append(torch.cuda.current_stream())
        stream.wait_stream(callers[-1])
        with torch.cuda.stream(stream):
            _, _, *rest = reduce(params, grads, group, stream, *args)
        callers.pop()
        return None, None, *rest  # the input and the event to wait for before it is let go of

    vars(_fsdp_collectives)["foreach_reduce_scatter_copy_in"] = copy_in_and_wait
    vars(_fsdp_param_group)["foreach_reduce"] = reduced


def main() -> None:
    """Run the program that the command line names, as python would."""
    _, age, *rest = sys.argv
    make_up_packages()
    give_old_names()
    if age == "then":
        reduce_in_its_stream()
        torch.backends.cuda.enable_cudnn_sdp(False)
    sys.argv = rest
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
