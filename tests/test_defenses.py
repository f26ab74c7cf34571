"""What defences have in common: names and options, descriptions that tell them apart, and certificates that outlive the
process and the precision they were made in."""

from __future__ import annotations

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
from patchproof.attacks import AttackPlan, attack_in_turn, defended_attacks
from patchproof.data import open_dataset
from patchproof.defenses import Defense, assess
from patchproof.types import CheckError, InputError
from small_model import plain_classifier

TESTS = str(Path(__file__).parent)
THREAT = pp.PatchThreat.square(image_size=(9, 9), pixels=2)


def classifier(images):
    return images.flatten(1)[:, :3]


def test_defences_have_names_and_options_of_their_own():
    for name in pp.DEFENSES:
        found = pp.defense(name, classifier, THREAT, per_axis=2, engine=pp.Engine(batch_size=7))
        assert isinstance(found, Defense)
        assert (found.name, len(found.masks), found.engine.batch_size) == (name, 4, 7)
    assert pp.defense("patchcleanser", classifier, THREAT, exhaustive=True).exhaustive
    with pytest.raises(InputError, match="unknown defence `patchcleaner`; did you mean `patchcleanser`"):
        pp.defense("patchcleaner", classifier, THREAT)
    with pytest.raises(InputError, match="the defence `alarm` has no option 'exhaustive'; it has per_axis"):
        pp.defense("alarm", classifier, THREAT, exhaustive=True)


def test_a_description_is_json_and_differs_where_certificates_could():
    """Also for masks that form no grid, and for grids of the same places whose masks are larger."""
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


def plain(count=2, **changes):
    """A defence of one's own that answers 0 to everything, and certifies it."""
    ones = torch.ones(count, dtype=torch.int64)
    answer = {"predictions": 0 * ones, "certified": ones > 0, "margin": ones.float(), "forwards": ones, "evidence": {}}
    answer |= changes
    predictions = answer.pop("predictions")
    own = {"name": "plain", "guarantee": answer.pop("guarantee", "recovery"), "threat": THREAT, "describe": dict}
    return SimpleNamespace(**own, predict=lambda _: predictions, certify=lambda *_: pp.Certificates(**answer))


REFUSED = {
    "answers −1: an alarm is for defences whose guarantee is detection": {"predictions": torch.tensor([0, -1])},
    "certifies a label that it does not itself answer": {"predictions": torch.tensor([0, 1])},
    r"predictions must be int64 of shape \(2,\), not torch.int64 of \(3,\)": {"predictions": torch.zeros(3).long()},
    "the evidence 'votes' must be a tensor of finite numbers with 2 rows": {"evidence": {"votes": torch.ones(3)}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_defence_of_ones_own_answers_is_checked(message):
    images, labels = torch.zeros(2, 1, 9, 9), torch.zeros(2, dtype=torch.int64)
    assert assess(plain(), images, labels).certificates.certified.all()
    assert assess(plain(guarantee="detection", predictions=torch.tensor([0, -1])), images, labels).predictions[1] == -1
    with pytest.raises(CheckError, match=message):
        assess(plain(**REFUSED[message]), images, labels)


PREDICT = """
import json, sys
from pathlib import Path
import torch
import patchproof as pp
from small_model import plain_network
network, threat = plain_network(), pp.PatchThreat.square(image_size=(28, 28), pixels=4)
network.load_state_dict(torch.load(f"{sys.argv[1]}/weights"))
for precision in ("fp32", "bf16"):
    defense = pp.defense("patchcleanser", network, threat, engine=pp.Engine(precision=precision, batch_size=13))
    files = sorted(Path(sys.argv[1], precision).iterdir())
    print(json.dumps({answer.path: answer.label for answer in pp.predict(defense, files)}))
"""


def test_what_one_precision_certifies_another_answers_right_in_a_fresh_process(tmp_path, generator):
    """Certified in bf16 and answered in float32, and the other way round, under noise and under adaptive patches."""
    network, source = plain_classifier(), open_dataset("fashion-mini")
    torch.save(network.state_dict(), tmp_path / "weights")
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=4)
    data = [(source.load(i), source.labels[i]) for i in range(0, 1000, 2)]
    expected = {}
    for made_in, answered_in in (("bf16", "fp32"), ("fp32", "bf16")):
        defense = pp.defense("patchcleanser", network, threat, engine=pp.Engine(precision=made_in))
        certified = [record for record in pp.certify(defense, data).records if record.certified]
        certified = sorted(certified, key=lambda record: record.margin)[:12]  # those closest to another answer
        labels = torch.tensor([record.label for record in certified])
        pixels = [torch.from_numpy(np.array(data[record.index][0])) for record in certified]
        images = torch.stack(pixels).permute(0, 3, 1, 2) / 255
        attacks = defended_attacks(
            pp.defense("patchcleanser", network, threat), AttackPlan(steps=4, restarts=1, places=1)
        )
        attacked = attack_in_turn(attacks, images, labels, seed=0, indices=range(len(labels)))
        noise = images.clone()
        for row, place in enumerate(attacked.places):
            drawn = torch.rand(3, 4, 4, generator=generator)
            noise[row, :, place.top : place.bottom, place.left : place.right] = drawn
        (tmp_path / answered_in).mkdir()
        for kind, patched in (("attacked", attacked.images), ("noise", noise)):
            for row, image in enumerate((patched * 255).round().byte()):
                path = tmp_path / answered_in / f"{kind}-{row}.png"
                Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(path)
                expected[str(path)] = int(labels[row])
    command, environment = [sys.executable, "-c", PREDICT, str(tmp_path)], os.environ | {"PYTHONPATH": TESTS}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = {path: label for line in done.stdout.splitlines() for path, label in json.loads(line).items()}
    assert found == expected
