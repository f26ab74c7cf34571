"""Projected gradient ascent inside a patch: sign steps with momentum, from several starts, at several places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from patchproof.attacks.base import Attack, Patched, Target
from patchproof.attacks.losses import Objective, Scene
from patchproof.attacks.places import all_places, as_rects, best_places, grid_places, hidden_by, inside, mass_inside
from patchproof.attacks.views import Aim, Lens, Views
from patchproof.geometry import MaskSet, PatchThreat
from patchproof.masking import Engine
from patchproof.types import Classifier, InputError, require_one_of

LOOKS = 4
"""How often, in the course of its steps, a patch is shown to the judge; an image that breaks is left alone then."""

CANDIDATES = 4
"""Patches of one image that are worked on side by side: some places, each with all its starts."""

MOMENTUM = 0.9

PlaceSearch = Literal["gradient", "grid", "exhaustive"]


@dataclass(frozen=True)
class AttackPlan:
    """How hard to try: `steps` of at most `step_size` for each of `restarts` starts at each of `places` places.

    The first start is the image itself, the others are noise. The size of a step falls linearly to zero. Places are
    those of most input-gradient, an even grid, or all of them whatever `places` says.
    """

    steps: int = 40
    restarts: int = 2
    places: int = 4
    step_size: float = 0.1
    search: PlaceSearch = "gradient"

    def __post_init__(self) -> None:
        for name in ("steps", "restarts", "places"):
            if getattr(self, name) < 1:
                raise InputError(f"an attack needs at least 1 of its {name}, not {getattr(self, name)}")
        if not 0 < self.step_size <= 1:
            raise InputError(f"the step size must be in (0, 1], as pixels are in [0, 1], not {self.step_size}")
        require_one_of("the search for places", self.search, get_args(PlaceSearch))


class GradientAttack(Attack):
    """Climb an objective's loss at the most promising places; the target's own answer says when an image is broken.

    `masks` are those of the defence, which the attacker knows; an objective about the classifier alone needs none.
    """

    def __init__(
        self,
        classifier: Classifier,
        target: Target,
        threat: PatchThreat,
        objective: Objective,
        *,
        masks: MaskSet | None = None,
        plan: AttackPlan | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(target, threat)
        if objective.needs_masks and masks is None:
            raise InputError(f"{type(objective).__name__} looks through masks; give the defence's mask set")
        self.classifier, self.objective = classifier, objective
        self.masks = masks if objective.needs_masks else None
        self.plan, self.engine = plan or AttackPlan(), engine or Engine()

    def search(
        self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"], generators: Sequence[torch.Generator]
    ) -> Patched:
        views = Views.of(self.masks, self.threat.image_size, images.device)
        lens = Lens(self.classifier, views, self.engine, whole_parts=images.is_cuda or self.engine.compile)
        every = torch.arange(len(lens.views.first), device=images.device)
        scene = Scene(lens.views, labels, lens.logits(images, every))
        places = self.places(lens, scene, images)
        best = _Best.start(images, places[:, 0], passes=len(every))
        for group in places.split(max(1, CANDIDATES // self.plan.restarts), dim=1):
            rows = torch.nonzero(~best.broken)[:, 0]
            if len(rows):
                self._climb(lens, scene[rows], self._start(images, rows, group[rows], generators), best)
        return Patched(best.images, as_rects(best.places), best.passes, best.queries)

    def places(self, lens: Lens, scene: Scene, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, "b r 4"]:
        """The places to try on each image, best first."""
        if self.plan.search == "exhaustive":
            return all_places(self.threat).to(images.device).expand(len(images), -1, -1)
        if self.plan.search == "grid":
            return grid_places(self.threat, self.plan.places).to(images.device).expand(len(images), -1, -1)
        every = all_places(self.threat).to(images.device)
        mass = mass_inside(self._saliency(lens, scene, images), every)
        score = mass / mass.amax(dim=1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
        if self.masks is not None:
            score = score + 2 * self.objective.promising(scene, hidden_by(every, self.masks))
        return every[best_places(score, every, self.plan.places)]

    def _saliency(self, lens: Lens, scene: Scene, images: Tensor) -> Float[Tensor, "b h w"]:
        """Σ_c |∂ cross-entropy / ∂x|, over the first round of a defence, or the whole image."""
        whole = torch.tensor([lens.views.whole], device=images.device)
        view = (whole if self.masks is None else lens.views.one_mask).expand(len(images), -1)
        aim = Aim(view, torch.ones_like(view, dtype=torch.bool), scene.labels)
        return lens.gradient(images, scene.labels, aim, _cross_entropy)[1].abs().sum(dim=1)

    def _start(
        self, images: Tensor, rows: Int64[Tensor, " s"], places: Int64[Tensor, "s g 4"], generators: Sequence[Any]
    ) -> _Candidates:
        """Every start at every place of the group, image by image."""
        restarts, group = self.plan.restarts, places.shape[1]
        owner = rows.repeat_interleave(group * restarts)
        local = torch.arange(len(rows), device=rows.device).repeat_interleave(group * restarts)
        place = places.flatten(0, 1).repeat_interleave(restarts, dim=0)
        attempt = torch.arange(restarts, device=rows.device).repeat(len(rows) * group)
        start = images[owner]
        for j in torch.nonzero(attempt)[:, 0].tolist():
            noise = torch.rand(start.shape[1:], generator=generators[int(owner[j])], dtype=start.dtype)
            start[j] = noise.to(start.device)
        within = inside(place, self.threat, images.device)
        started = torch.where(within, start, images[owner])
        return _Candidates(owner, local, place, attempt, within, started, torch.zeros_like(started))

    def _climb(self, lens: Lens, scene: Scene, candidates: _Candidates, best: _Best) -> None:
        """All steps for one group of places; what breaks is taken out at the next look."""
        aim = self.objective.aim(scene[candidates.local], candidates.place, candidates.attempt)
        looks = {-(-self.plan.steps * look // LOOKS) for look in range(1, LOOKS + 1)}
        for step in range(self.plan.steps):
            labels = scene.labels[candidates.local]
            value, gradient = lens.gradient(candidates.images, labels, aim, self.objective.loss)
            best.passes.index_add_(0, candidates.owner, aim.passes)
            candidates.step(gradient, self.plan.step_size * (1 - step / self.plan.steps))
            if step + 1 in looks:
                best.judge(candidates, value, self.target.predict(candidates.images) != labels)
                left = torch.nonzero(~best.broken[candidates.owner])[:, 0]
                candidates, aim = candidates[left], aim[left]
                if not len(left):
                    return


@dataclass
class _Candidates:
    """Patches in the making: candidate j is on image `owner[j]`, row `local[j]` of the scene."""

    owner: Int64[Tensor, " j"]
    local: Int64[Tensor, " j"]
    place: Int64[Tensor, "j 4"]
    attempt: Int64[Tensor, " j"]
    within: Bool[Tensor, "j 1 h w"]
    images: Float[Tensor, "j c h w"]
    momentum: Float[Tensor, "j c h w"]

    def __getitem__(self, rows: Tensor) -> _Candidates:
        return _Candidates(*(getattr(self, f.name)[rows] for f in fields(self)))

    def step(self, gradient: Tensor, size: float) -> None:
        """Up the sign of the running gradient, inside the patch and inside [0, 1]."""
        gradient = gradient.masked_fill(~self.within, 0)
        scale = gradient.abs().mean(dim=(1, 2, 3), keepdim=True).clamp(min=torch.finfo(gradient.dtype).tiny)
        self.momentum = MOMENTUM * self.momentum + gradient / scale
        moved = (self.images + size * self.momentum.sign()).clamp(0, 1)
        self.images = torch.where(self.within, moved, self.images)


@dataclass
class _Best:
    """For each image the first patch that broke it, or else the one of greatest loss."""

    images: Float[Tensor, "b c h w"]
    places: Int64[Tensor, "b 4"]
    broken: Bool[Tensor, " b"]
    value: Float[Tensor, " b"]
    passes: Int64[Tensor, " b"]
    queries: Int64[Tensor, " b"]

    @classmethod
    def start(cls, images: Tensor, places: Tensor, *, passes: int) -> _Best:
        count = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        value = torch.full((len(images),), -torch.inf, device=images.device)
        return cls(images.clone(), places.clone(), count.bool(), value, count + passes, count.clone())

    def judge(self, candidates: _Candidates, value: Float[Tensor, " j"], wrong: Bool[Tensor, " j"]) -> None:
        self.queries.index_add_(0, candidates.owner, torch.ones_like(candidates.owner))
        largest = torch.finfo(value.dtype).max
        score = torch.where(wrong, torch.inf, value.clamp(max=largest))
        for row in candidates.owner.unique().tolist():
            mine = torch.nonzero(candidates.owner == row)[:, 0]
            pick = mine[score[mine].argmax()]
            if score[pick] > self.value[row]:
                self.images[row], self.places[row] = candidates.images[pick], candidates.place[pick]
                self.value[row], self.broken[row] = score[pick], wrong[pick]


def _cross_entropy(logits: Tensor, labels: Tensor, aim: Aim) -> Tensor:
    """The mean over all copies."""
    every = functional.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(logits.shape[1]), reduction="none")
    return every.unflatten(0, logits.shape[:2]).mean(dim=1)
