"""A training step without a launch for each kernel."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from patchproof.masking import COPYING, MaskedForward, out_of_memory
from patchproof.models import failure
from patchproof.types import CheckError


class RecordedPass(MaskedForward):
    """`MaskedForward` on a GPU whose kernels, forward and backward, are compiled and recorded for the shape of the
    first whole batch and replayed from then on (CUDA graphs); batches of another shape run as ever.

    Compiled, a large batch moves less memory; recorded, a small one does not wait for Python to launch its kernels.
    """

    def __init__(self, classifier: nn.Module, batch_size: int) -> None:
        super().__init__(classifier)
        self.batch_size = batch_size
        self._shape: torch.Size | None = None
        self._replay: Callable[[Tensor, Tensor], Tensor]

    def forward(self, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"]) -> Float[Tensor, "b classes"]:
        if self._shape is None and len(images) % self.batch_size == 0:  # a resumed run may begin with a short one
            self._record(images, keep)
        if images.shape != self._shape:
            return super().forward(images, keep)
        return self._replay(images, keep)

    def _record(self, images: Tensor, keep: Tensor) -> None:
        """Trial passes come first; the statistics of BatchNorm and the random state are then put back.

        The network is compiled for the recording alone: other passes of it, and copies, are not.
        """
        network: nn.Module = getattr(self.classifier, "module", self.classifier)
        buffers = [(buffer, buffer.clone()) for buffer in self.buffers()]
        mixed = torch.autocast(
            "cuda",
            dtype=torch.get_autocast_dtype("cuda"),
            enabled=torch.is_autocast_enabled("cuda"),
            cache_enabled=False,  # weights are cast in each replay
        )
        # Gradients are recorded on a stream of their own, which torch would warn of at every training.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        own, collecting = network._compiled_call_impl, gc.isenabled()
        network.compile(dynamic=False, options={"fallback_random": True})  # dropout as without
        gc.collect()
        gc.disable()  # an older recording that is collected during this one may end it
        try:
            with COPYING, torch.random.fork_rng(devices=[images.device]), mixed:
                self._replay = torch.cuda.make_graphed_callables(  # type: ignore[assignment]
                    MaskedForward(self.classifier), (images.clone(), keep.clone()), allow_unused_input=True
                )
        except Exception as error:
            if out_of_memory(error):
                raise
            raise CheckError(
                f"the kernels of this classifier's training step cannot be recorded ({failure(error)}); use "
                "compile=False"
            ) from error
        finally:
            if collecting:
                gc.enable()
            network._compiled_call_impl = own
        for buffer, value in buffers:
            buffer.copy_(value)
        self._shape = images.shape
