"""Properties of all defences: names, options, descriptions, checked results, and certificates that hold in any process
and precision."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import patchproof as pp
from patchproof.defenses import Defense, assess, require_defense
from patchproof.defenses._table import TABLE_CELLS
from patchproof.runs._cost import require_memory
from patchproof.types import CheckError, InputError
from small_model import Startled

TESTS = str(Path(__file__).parent)
THREAT = pp.PatchThreat.square(image_size=(9, 9), pixels=2)


def classifier(images):
    return images.flatten(1)[:, :3]


def test_defences_have_names_and_options_of_their_own():
    for name in ("patchcleanser", "alarm"):
        found = pp.defense(name, classifier, THREAT, per_axis=2, engine=pp.Engine(batch_size=7))
        assert isinstance(found, Defense)
        assert (found.name, len(found.masks), found.engine.batch_size) == (name, 4, 7)
    assert pp.defense("patchcleanser", classifier, THREAT, exhaustive=True).exhaustive
    with pytest.raises(InputError, match="unknown defence `patchcleaner`; did you mean `patchcleanser`"):
        pp.defense("patchcleaner", classifier, THREAT)
    with pytest.raises(InputError, match="the defence `alarm` has no option 'exhaustive'; it has per_axis"):
        pp.defense("alarm", classifier, THREAT, exhaustive=True)


def test_descriptions_are_json_and_differ_if_certificates_could():
    """This includes masks that form no grid, and larger masks at the same places."""
    rects = pp.covering_masks(THREAT, per_axis=3).rects
    larger = tuple(pp.Rect(r.top, r.left, r.height if r.top else r.height + 1, r.width) for r in rects)
    described = [
        pp.PatchCleanser(classifier, pp.MaskSet((9, 9), masks), threat, engine=engine, exhaustive=exhaustive).describe()
        for masks, threat, engine, exhaustive in [
            (rects, THREAT, pp.Engine(), False),
            (larger, THREAT, pp.Engine(), False),
            ((*rects, pp.Rect(1, 1, 5, 5)), THREAT, pp.Engine(), False),
            (rects, pp.PatchThreat((9, 9), ((2, 1),)), pp.Engine(), False),
            (rects, THREAT, pp.Engine(precision="bf16"), False),
            (rects, THREAT, pp.Engine(), True),
        ]
    ]
    described.append(pp.Alarm(classifier, pp.MaskSet((9, 9), rects), THREAT).describe())
    assert len({json.dumps(each, sort_keys=True) for each in described}) == len(described)


@pytest.mark.parametrize(
    ("kind", "per_axis", "patches", "remarked"),
    [
        (pp.PatchCleanser, 3, 1, 0),
        (pp.PatchCleanser, 1, 1, 1),
        (pp.PatchCleanser, (1, 2), 1, 1),
        (pp.PatchCleanser, 2, 2, 1),
        (pp.PatchCleanser, 3, 2, 0),
        (pp.Alarm, 1, 1, 1),
        (pp.Alarm, (1, 2), 1, 0),
        (pp.Alarm, 2, 2, 0),
    ],
)
def test_the_user_is_told_if_masked_copies_show_nothing(kind, per_axis, patches, remarked, notes):
    threat = pp.PatchThreat((28, 28), ((5, 5),), patches)
    kind(torch.relu, pp.covering_masks(threat, per_axis=per_axis), threat)
    assert [note[:37] for note in notes] == ["some masked copies show nothing of th"] * remarked


def test_only_masking_defences_accept_two_patches_and_describe_them(monkeypatch):
    two = pp.PatchThreat(THREAT.image_size, THREAT.patch_sizes, patches=2)
    for name in ("patchcleanser", "alarm"):
        one, both = (pp.defense(name, classifier, threat).describe() for threat in (THREAT, two))
        assert both == one | {"patches": 2}
        assert "patches" not in one
    large = pp.defense(
        "patchcleanser", classifier, pp.PatchThreat.square(image_size=(224, 224), pixels=8, patches=2), per_axis=8
    )
    assert large.images_at_once * (2080 * 2081 // 2) <= TABLE_CELLS
    monkeypatch.setattr("patchproof.runs._cost.free_memory", lambda: 200_000_000)
    with pytest.raises(InputError, match=r"2,080 masks make up to 679,120 masked copies .* per_axis 6 is the most"):
        require_memory(large)
    require_memory(pp.defense("alarm", classifier, large.threat, per_axis=8))  # it has no table of pairs
    for name in set(pp.DEFENSES) - {"patchcleanser", "alarm"}:
        with pytest.raises(InputError, match=f"{name} certifies against one patch, not 2; patchcleanser and alarm"):
            pp.defense(name, classifier, two)


def plain(count=2, **changes):
    """A user's defence that predicts 0 for every image and certifies it, except for `changes`."""
    ones = torch.ones(count, dtype=torch.int64)
    answer = {"predictions": 0 * ones, "certified": ones > 0, "margin": ones.float(), "forwards": ones, "evidence": {}}
    answer |= changes
    predictions = answer.pop("predictions")
    own = {"name": "plain", "guarantee": answer.pop("guarantee", "recovery"), "threat": THREAT, "describe": dict}
    own |= {"assess": answer.pop("assess")} if "assess" in answer else {}
    return SimpleNamespace(**own, predict=lambda _: predictions, certify=lambda *_: pp.Certificates(**answer))


REFUSED = {
    "answers −1: an alarm is for defences whose guarantee is detection": {"predictions": torch.tensor([0, -1])},
    "certifies a label that it does not itself answer": {"predictions": torch.tensor([0, 1])},
    r"certifies a label that it does not itself answer$": {
        "predictions": torch.tensor([-1, 1]),
        "guarantee": "detection",
    },
    "answers −2: labels are 0 or more, an alarm −1": {"predictions": torch.tensor([0, -2]), "guarantee": "detection"},
    "assess must return an Assessment, not tuple": {"assess": lambda *_: ()},
    "the evidence 'votes' must be a tensor of finite numbers with 2 rows$": {"evidence": {"votes": torch.tensor(1)}},
    r"predictions must be int64 of shape \(2,\), not torch.int64 of \(3,\)": {"predictions": torch.zeros(3).long()},
    "the evidence 'votes' must be a tensor of finite numbers with 2 rows": {"evidence": {"votes": torch.ones(3)}},
    "the evidence 'votes' is a value and has parts": {
        "evidence": {"votes": torch.ones(2), "votes.label": torch.ones(2)}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_results_of_a_users_defence_are_checked(message):
    images, labels = torch.zeros(2, 1, 9, 9), torch.zeros(2, dtype=torch.int64)
    assert assess(plain(), images, labels).certificates.certified.all()
    assert assess(plain(guarantee="detection", predictions=torch.tensor([0, -1])), images, labels).predictions[1] == -1
    assert assess(plain(margin=torch.ones(2, dtype=torch.float64)), images, labels).certificates.certified.all()
    with pytest.raises(CheckError, match=message):
        assess(plain(**REFUSED[message]), images, labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threat": (9, 9)}, r"\.threat must be a pp.PatchThreat, not tuple"),
        ({"name": 3}, r"\.name must be text, not int"),
        ({"engine": "fp16"}, r"\.engine must be a pp.Engine, not str"),
        ({"images_at_once": 0}, r"\.images_at_once must be a whole number of at least 1, not 0"),
        ({"images_at_once": 2.5}, r"\.images_at_once must be a whole number of at least 1, not 2.5"),
    ],
)
def test_members_of_a_users_defence_are_checked(change, message):
    require_defense(plain())
    with pytest.raises(InputError, match=message):
        require_defense(SimpleNamespace(**vars(plain()) | change))
    with pytest.raises(InputError, match=r"must be an instance: Alarm is a class; give Alarm\(…\)"):
        require_defense(pp.Alarm)


def test_what_functions_of_a_users_defence_return_is_checked(tmp_path):
    """Before the folder has a result, and not as an image that cannot be used."""

    class Forgetful(pp.PatchCleanser):
        def with_engine(self, engine):
            super().with_engine(engine)

    threat, image = pp.PatchThreat.square(image_size=(12, 12), pixels=3), torch.rand(3, 12, 12)
    forgetful = Forgetful(Startled().eval(), pp.covering_masks(threat, per_axis=2), threat)
    for ask in (
        lambda: pp.certify(forgetful, [(image, 0)], folder=tmp_path / "run"),
        lambda: pp.predict(forgetful, [image]),
    ):
        with pytest.raises(CheckError, match=r"Forgetful.with_engine must return a defence: NoneType is no defence"):
            ask()
    with pytest.raises(CheckError, match="the function given as defense must return a defence: NoneType is no"):
        pp.predict(lambda size: None, [image])
    undescribed = SimpleNamespace(**vars(plain(1)) | {"describe": lambda: None})
    with pytest.raises(InputError, match="describe must return a mapping of JSON values, not NoneType"):
        pp.certify(undescribed, [(image, 0)])


PREDICT = """
import json, sys
from pathlib import Path
import patchproof as pp
from small_model import Startled
threat = pp.PatchThreat.square(image_size=(12, 12), pixels=3)
for precision in ("fp32", "bf16"):
    engine = pp.Engine(precision=precision, batch_size=13)
    defense = pp.defense("patchcleanser", Startled().eval(), threat, engine=engine)
    files = sorted(Path(sys.argv[1], precision).iterdir())
    print(json.dumps({answer.path: answer.label for answer in pp.predict(defense, files)}))
"""


def test_certificates_hold_in_another_precision_and_a_fresh_process(tmp_path, generator):
    """Certify in bf16 and predict in float32, and the other way round.

    The certified images of smallest margin get white and noise patches everywhere. Without τ, dozens of these
    predictions are wrong.
    """
    threat, expected = pp.PatchThreat.square(image_size=(12, 12), pixels=3), []
    pixels = torch.randint(0, 128, (150, 12, 12, 3), generator=generator, dtype=torch.uint8).numpy()
    data = [(Image.fromarray(image), 0) for image in pixels]
    for made_in, answered_in in (("bf16", "fp32"), ("fp32", "bf16")):
        defense = pp.defense("patchcleanser", Startled().eval(), threat, engine=pp.Engine(precision=made_in))
        certified = [record for record in pp.certify(defense, data).records if record.certified]
        (tmp_path / answered_in).mkdir()
        for record in sorted(certified, key=lambda record: record.margin)[:5]:
            for top, left in itertools.product((0, 4, 9), repeat=2):
                for kind, content in (("white", 255), ("noise", np.random.default_rng(0).integers(0, 256, (3, 3, 3)))):
                    patched = pixels[record.index].copy()
                    patched[top : top + 3, left : left + 3] = content
                    expected.append(str(tmp_path / answered_in / f"{record.index}-{top}-{left}-{kind}.png"))
                    Image.fromarray(patched).save(expected[-1])
    command, environment = [sys.executable, "-c", PREDICT, str(tmp_path)], os.environ | {"PYTHONPATH": TESTS}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = {path: label for line in done.stdout.splitlines() for path, label in json.loads(line).items()}
    assert len(expected) == 2 * 5 * 9 * 2
    assert found == dict.fromkeys(expected, 0)
