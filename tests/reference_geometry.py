"""A slow reference of the geometry in plain Python: it lists every patch position, pixel and subset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, combinations_with_replacement
from math import ceil, floor

Box = tuple[int, int, int, int]
"""(top, left, height, width)."""

Interval = tuple[int, int]
Size = tuple[int, int]
Pixels = frozenset[tuple[int, int]]


def pixels(box: Box) -> Pixels:
    top, left, height, width = box
    return frozenset((y, x) for y in range(top, top + height) for x in range(left, left + width))


def hull(points: Iterable[tuple[int, int]]) -> Box | None:
    points = list(points)
    if not points:
        return None
    rows, columns = [y for y, _ in points], [x for _, x in points]
    return min(rows), min(columns), max(rows) - min(rows) + 1, max(columns) - min(columns) + 1


def positions(image_size: Size, patch_size: Size) -> Iterator[Box]:
    for top in range(image_size[0] - patch_size[0] + 1):
        for left in range(image_size[1] - patch_size[1] + 1):
            yield top, left, *patch_size


def hides(mask: Box, patch: Box) -> bool:
    (a, b, h, w), (top, left, height, width) = mask, patch
    return a <= top and top + height <= a + h and b <= left and left + width <= b + w


def uncovered(image_size: Size, masks: Sequence[Box], patch_sizes: Sequence[Size]) -> list[Box]:
    patches = [patch for size in patch_sizes for patch in positions(image_size, size)]
    return [patch for patch in patches if not any(hides(mask, patch) for mask in masks)]


def uncovered_pairs(
    image_size: Size, masks: Sequence[Sequence[Box]], patch_sizes: Sequence[Size]
) -> list[tuple[Box, Box]]:
    """The unordered pairs of positions that no mask (a union of boxes) hides together, pixel by pixel."""
    patches = [patch for size in patch_sizes for patch in positions(image_size, size)]
    hidden = [frozenset().union(*map(pixels, mask)) for mask in masks]
    hiding = {patch: {i for i, mask in enumerate(hidden) if pixels(patch) <= mask} for patch in patches}
    return [(a, b) for a, b in combinations_with_replacement(patches, 2) if not hiding[a] & hiding[b]]


def axis_masks(n: int, p: int, k: int) -> list[Interval]:
    """docs/method.md: s = ceil((n − p + 1)/k), m = min(p + s − 1, n), starts 0, s, 2s, … clamped to n − m."""
    s = ceil(Fraction(n - p + 1, k))
    m = min(p + s - 1, n)
    starts: list[int] = []
    for j in range(k):
        start = min(j * s, n - m)
        if start not in starts:
            starts.append(start)
    return [(start, start + m) for start in starts]


def square_side(percent: str, image_size: Size) -> int:
    """Count up until the square is no smaller than the share; `percent` as text, so that it is exact."""
    side = 0
    while side * side < Fraction(percent) / 100 * image_size[0] * image_size[1]:
        side += 1
    return side


def keep(image_size: Size, masks: Sequence[Box]) -> list[list[list[bool]]]:
    hidden = [pixels(mask) for mask in masks]
    return [[[(y, x) not in h for x in range(image_size[1])] for y in range(image_size[0])] for h in hidden]


def fewest_covering(parent: Interval, small: Sequence[Interval]) -> tuple[int, ...] | None:
    """The best of all subsets whose union contains `parent`: fewest, then least sticking out, then lowest indices."""
    wanted = set(range(*parent))
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for count in range(1, len(small) + 1):
        for chosen in combinations(range(len(small)), count):
            union = {x for i in chosen for x in range(*small[i])}
            if wanted <= union:
                found.append((count, len(union - wanted), chosen))
    return min(found)[2] if found else None


def centre(x: int, native: int, resized: int) -> Fraction:
    """The position of resized pixel x on the native axis, where pixel i is centred on i."""
    return Fraction(2 * x + 1, 2) * Fraction(native, resized) - Fraction(1, 2)


def nearest_source(x: int, native: int, resized: int) -> int:
    return floor(centre(x, native, resized) + Fraction(1, 2))


def has_tie(native: int, resized: int) -> bool:
    """True if a resized pixel is centred between two native pixels, so that rounding decides which one it copies."""
    return any((centre(x, native, resized) + Fraction(1, 2)).denominator == 1 for x in range(resized))


def kernel(distance: Fraction, interpolation: str) -> Fraction:
    """Bilinear, or Keys' cubic with a = −3/4."""
    d, a = abs(distance), Fraction(-3, 4)
    if interpolation == "bilinear":
        return max(1 - d, Fraction(0))
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * (d**3 - 5 * d**2 + 8 * d - 4) if d < 2 else Fraction(0)


def resize_weights(native: int, resized: int, interpolation: str) -> list[list[Fraction]]:
    """[x][i], without antialiasing: a tap outside the image reads the pixel at the rim."""
    weights = [[Fraction(0)] * native for _ in range(resized)]
    for x in range(resized):
        for tap in range(-3, native + 3):
            weight = kernel(centre(x, native, resized) - tap, interpolation)
            weights[x][min(max(tap, 0), native - 1)] += weight
    return weights
