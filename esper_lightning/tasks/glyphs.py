"""Letters and digits in 62 classes, rendered from the fonts of matplotlib, without a download.

Pillow draws each character once per font; torch distorts copies of these drawings. S is the side of an image in pixels.
"""

import math
import string
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from esper_lightning.tasks.task import Split, Task, TaskData

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""Characters in the order of their classes."""

FONTS = (
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold",
    "DejaVuSansMono-BoldOblique", "DejaVuSerif-BoldItalic", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralBolIta",
    "cmb10", "cmss10", "cmti10",
)  # fmt: skip

DRAWING_SIDE, CAPITAL_HEIGHT = 64, 34
"""Side of a drawing, and height of the letter H in it, in pixels."""

RENDER_BATCH = 2000
"""Images rendered at once. The random numbers of an image depend on it."""

PIXEL_MEAN, PIXEL_STD = 0.5, 0.3
"""Mean and standard deviation of pixels in [0, 1] that are mapped to 0 and 1."""

Level = Literal["mild", "easy"]


class Distortion(NamedTuple):
    """Largest distortions of a character; each image draws its own, uniformly. Lengths are shares of half the side."""

    rotate: float  # degrees, either way
    scale: float  # logarithm of the scale, either way
    shear: float
    shift: float
    elastic: float  # displacement of a smooth random field
    stroke: float  # share of images with thicker or thinner strokes
    blur: float  # share of blurred images
    clutter: float  # share of images with a part of another character at the edge
    background: float  # brightness of an uneven ground, of 1
    contrast: float  # smallest contrast of the character, of 1
    noise: float  # standard deviation of a pixel, of 1


LEVELS: dict[Level, Distortion] = {
    "mild": Distortion(10, 0.15, 0.1, 0.08, 0.0, 0.0, 0.0, 0.0, 0.2, 0.6, 0.05),
    "easy": Distortion(15, 0.2, 0.2, 0.1, 0.04, 0.2, 0.2, 0.2, 0.3, 0.5, 0.08),
}
"""Distortions by level. After 20 passes over 20,000 images of level easy, a CNN of base 8 classifies 70 % of new 16×16
images."""


class Glyphs(Task):
    """Classification of rendered letters and digits, 62 classes that tell capitals from small letters.

    Images are equal in every process on a machine; another version of FreeType may draw other outlines. 20,000 images
    of 16×16 pixels take two seconds, of 32×32 pixels eight.

    Args:
        side: Side S of an image in pixels.
        level: Difficulty; see `LEVELS`.
        channels: 1 for grey, 3 for RGB, in which character and ground have a random brightness in each channel.
        train, validation, test: Number of images in each split.
    """

    def __init__(
        self,
        side: Literal[16, 32] = 16,
        level: Level = "easy",
        *,
        channels: Literal[1, 3] = 1,
        train: int = 20_000,
        validation: int = 2_000,
        test: int = 4_000,
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"Glyphs: unknown level {level!r}; choose one of {', '.join(LEVELS)}")
        if min(train, validation, test) < 1:
            raise ValueError(f"Glyphs: each split needs at least 1 image, got {train}, {validation} and {test}")
        self.side = side
        self.channels = channels
        self.distortion = LEVELS[level]
        self.sizes = (train, validation, test)

    def load(self) -> TaskData:
        splits, drawings = [], draw_fonts()
        for i, size in enumerate(self.sizes):
            generator = torch.Generator().manual_seed(i)
            renderer = _Renderer(drawings, self.side, self.channels, distortion=self.distortion, generator=generator)
            batches = [renderer.render(min(RENDER_BATCH, size - begin)) for begin in range(0, size, RENDER_BATCH)]
            splits.append(Split(*map(torch.cat, zip(*batches, strict=True))))
        return TaskData(*splits, outputs=len(CHARACTERS))


def draw_fonts() -> Tensor:  # [fonts, 62, 64, 64] in 0 … 1
    """Draw every character once per font, in a size in which its H has the height of `CAPITAL_HEIGHT`."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")

    def load(name: str, height: int) -> Any:
        return ImageFont.truetype(folder / f"{name}.ttf", height, layout_engine=ImageFont.Layout.BASIC)

    drawings = []
    for name in FONTS:
        _, top, _, bottom = load(name, CAPITAL_HEIGHT).getbbox("H")
        font = load(name, round(CAPITAL_HEIGHT**2 / (bottom - top)))
        for character in CHARACTERS:
            image = Image.new("L", (DRAWING_SIDE, DRAWING_SIDE))
            left, top, right, bottom = font.getbbox(character)
            corner = ((DRAWING_SIDE - (right - left)) / 2 - left, (DRAWING_SIDE - (bottom - top)) / 2 - top)
            ImageDraw.Draw(image).text(corner, character, font=font, fill=255)
            drawings.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8))
    shape = (len(FONTS), len(CHARACTERS), DRAWING_SIDE, DRAWING_SIDE)
    return torch.stack(drawings).view(shape).to(torch.float32) / 255.0


class _Renderer:
    """Renders batches of images of random characters in random fonts, given drawings [fonts, 62, 64, 64]."""

    def __init__(
        self, drawings: Tensor, side: int, channels: int, *, distortion: Distortion, generator: torch.Generator
    ) -> None:
        self.side, self.channels = side, channels
        self.distortion = distortion
        self.generator = generator
        flat = drawings.flatten(0, 1)[:, None]
        thick = F.max_pool2d(flat, 3, 1, 1)
        thin = (flat - F.max_pool2d(-flat, 3, 1, 1)) / 2  # half the way only, so that hairlines stay
        self.strokes = torch.stack([flat, thick, thin]).unflatten(1, (len(drawings), -1))  # [3, fonts, 62, 1, 64, 64]

    def render(self, count: int) -> tuple[Tensor, Tensor]:  # [count, C, S, S], [count] int64
        limits = self.distortion
        glyph, targets = self._draw(count)
        weight = self._share(count, limits.blur) * self._uniform(count, 1, 1, 1)
        glyph = torch.lerp(glyph, F.avg_pool2d(glyph, 3, 1, 1), weight)
        neighbour, _ = self._draw(count, at_edge=True)
        glyph = torch.maximum(glyph, neighbour * self._share(count, limits.clutter))
        ground = limits.background * F.interpolate(
            self._uniform(count, self.channels, 3, 3), size=self.side, mode="bicubic", align_corners=True
        )
        ink = limits.contrast + (1.0 - limits.contrast) * self._uniform(count, self.channels, 1, 1)
        image = ground * (1.0 - glyph) + glyph * (ink + ground * (1.0 - ink))
        image = torch.where(self._share(count, 0.5) > 0.0, image, 1.0 - image)
        noise = torch.randn(image.shape, generator=self.generator, dtype=image.dtype)
        return (image + limits.noise * noise - PIXEL_MEAN) / PIXEL_STD, targets

    def _draw(self, count: int, at_edge: bool = False) -> tuple[Tensor, Tensor]:
        """Return distorted characters [count, 1, S, S], with their centres near the edge if asked, and classes."""
        limits = self.distortion
        fonts = self._integers(self.strokes.shape[1], count)
        targets = self._integers(len(CHARACTERS), count)
        stroke = self._share(count, limits.stroke).flatten().to(torch.int64) * (1 + self._integers(2, count))
        angle = self._signed(count) * math.radians(limits.rotate)
        scale = 0.8 * torch.exp(self._signed(count) * limits.scale)
        shear = self._signed(count) * limits.shear
        aspect = torch.exp(self._signed(count) * limits.scale * 0.4)
        shift_x, shift_y = self._signed(2, count) * limits.shift
        if at_edge:
            direction, distance = self._signed(count) * math.pi, 0.95 + 0.15 * self._signed(count)
            shift_x, shift_y = direction.cos() * distance, direction.sin() * distance
        # Twice as fine as the image, and averaged below. Products of elements, not of matrices, whose order of addition
        # may depend on the number of threads.
        fine = 2 * self.side
        centres = (2.0 * torch.arange(fine, dtype=torch.float32) + 1.0) / fine - 1.0
        x, y = centres[None, None, :], centres[None, :, None]
        a, b = scale * angle.cos() * aspect, scale * (shear - angle.sin())
        c, d = scale * angle.sin(), scale * angle.cos() / aspect
        a, b, c, d, e, f = (values[:, None, None] for values in (a, b, shift_x, c, d, shift_y))  # [count, 1, 1]
        grid = torch.stack([a * x + b * y + c, d * x + e * y + f], 3)
        field = F.interpolate(self._signed(count, 2, 4, 4), size=fine, mode="bicubic", align_corners=True)
        grid = grid + 1.5 * limits.elastic * field.permute(0, 2, 3, 1)
        picture = F.grid_sample(self.strokes[stroke, fonts, targets], grid, align_corners=False)
        return F.avg_pool2d(picture, 2), targets

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float32)

    def _signed(self, *shape: int) -> Tensor:
        """Return uniform random numbers in [-1, 1]."""
        return 2.0 * self._uniform(*shape) - 1.0

    def _integers(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), generator=self.generator)

    def _share(self, count: int, share: float) -> Tensor:  # [count, 1, 1, 1]
        """Return 1.0 for a random share of the images, and 0.0 for the others."""
        return (self._uniform(count, 1, 1, 1) < share).to(torch.float32)
