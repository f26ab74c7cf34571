"""Training passes whose kernels are recorded and replayed (CUDA graphs)."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from patchproof.masking import COPYING, MaskedForward, out_of_memory
from patchproof.types import CheckError, failure


class RecordedPass(MaskedForward):
    """`MaskedForward` on a GPU, compiled and recorded for the shape of the first whole batch, and then replayed.

    Both the forward and the backward pass are recorded; batches of another shape run as usual. A compiled large batch
    moves less memory, and a recorded small batch does not wait for Python to launch its kernels.
    """

    def __init__(self, classifier: nn.Module, batch_size: int) -> None:
        super().__init__(classifier)
        self.batch_size = batch_size
        self._shape: torch.Size | None = None
        self._replay: Callable[[Tensor, Tensor], Tensor]

    def forward(self, images: Float[Tensor, "b c h w"], keep: Bool[Tensor, "b 1 h w"]) -> Float[Tensor, "b classes"]:
        if self._shape is None and len(images) % self.batch_size == 0:  # a resumed run may begin with a short batch
            self._record(images, keep)
        if images.shape != self._shape:
            return super().forward(images, keep)
        return self._replay(images, keep)

    def _record(self, images: Tensor, keep: Tensor) -> None:
        """Record the kernels, and restore what the trial passes change: BatchNorm's statistics and the random state.

        The network is compiled only during the recording; its other passes and its copies are not.
        """
        network: nn.Module = getattr(self.classifier, "module", self.classifier)
        buffers = [(buffer, buffer.clone()) for buffer in self.buffers()]
        mixed = torch.autocast(
            "cuda",
            dtype=torch.get_autocast_dtype("cuda"),
            enabled=torch.is_autocast_enabled("cuda"),
            cache_enabled=False,  # every replay must cast the weights again
        )
        # Gradients are recorded on a separate stream; torch would warn about that in every training.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        own, collecting = network._compiled_call_impl, gc.isenabled()
        network.compile(dynamic=False, options={"fallback_random": True})  # the same dropout as without compilation
        gc.collect()
        gc.disable()  # collecting an older recording may abort this one
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
