"""Letters and digits in 62 classes, rendered from the fonts of matplotlib and Pillow, without a download.

Pillow draws each character once per font; torch distorts copies of these drawings. S is the side of an image in pixels.
"""

import math
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from esper_lightning.machine import check_memory
from esper_lightning.tasks.task import Split, Task, TaskData, check_data_seed

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""Characters in the order of their classes."""

PILLOW_FONT = "Aileron"
"""Font inside Pillow; all others are files of matplotlib."""

TRAINING_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif-BoldItalic",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralBolIta",
    "cmb10",
    "cmss10",
    "cmti10",
)
VALIDATION_FONTS = ("DejaVuSans-BoldOblique", "DejaVuSerif", "STIXGeneralBol", "cmr10")
TEST_FONTS = (PILLOW_FONT, "DejaVuSansMono-Oblique", "DejaVuSerif-Bold", "STIXGeneralItalic", "cmtt10")

DRAWING_SIDE, CAPITAL_HEIGHT = 64, 34
"""Side of a drawing, and height of the letter H in it, in pixels."""

RENDER_BATCH = 2000
"""Images rendered at once. The random numbers of an image depend on it."""

PIXEL_MEAN, PIXEL_STD = 0.5, 0.3
"""Mean and standard deviation of pixels in [0, 1] that are mapped to 0 and 1."""

Level = Literal["mild", "easy", "medium", "hard"]


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
    "mild": Distortion(
        rotate=10, scale=0.15, shear=0.1, shift=0.08, elastic=0.0, stroke=0.0, blur=0.0, clutter=0.0, background=0.2,
        contrast=0.6, noise=0.05,
    ),
    "easy": Distortion(
        rotate=15, scale=0.2, shear=0.2, shift=0.1, elastic=0.04, stroke=0.2, blur=0.2, clutter=0.2, background=0.3,
        contrast=0.5, noise=0.08,
    ),
    "medium": Distortion(
        rotate=20, scale=0.25, shear=0.25, shift=0.12, elastic=0.06, stroke=0.3, blur=0.3, clutter=0.5, background=0.4,
        contrast=0.4, noise=0.12,
    ),
    "hard": Distortion(
        rotate=30, scale=0.3, shear=0.35, shift=0.15, elastic=0.1, stroke=0.4, blur=0.4, clutter=0.8, background=0.5,
        contrast=0.3, noise=0.2,
    ),
}  # fmt: skip
"""Distortions by level of difficulty.

After 20 passes over 20,000 images of level easy, a CNN of base 8 classifies 70 % of new 16×16 images; medium is too
hard for short runs."""


class Glyphs(Task):
    """Classification of rendered letters and digits, 62 classes that tell capitals from small letters.

    Images are equal in every process on a machine; another version of FreeType may draw other outlines. 20,000 images
    of 16×16 pixels take two seconds, of 32×32 pixels eight.

    Args:
        side: Side S of an image in pixels.
        level: Difficulty; see `LEVELS`.
        train, validation, test: Number of images in each split.
        unseen_fonts: Render validation and test images in fonts of their own (four and five), in place of the 13 fonts
            of the training images. The training images are the same either way.
        rng_seed: RNG seed of all images.
    """

    def __init__(
        self,
        side: Literal[16, 32] = 16,
        level: Level = "easy",
        *,
        train: int = 20_000,
        validation: int = 2_000,
        test: int = 4_000,
        unseen_fonts: bool = False,
        rng_seed: int = 0,
    ) -> None:
        if side not in (16, 32):
            raise ValueError(f"Glyphs: side must be 16 or 32 pixels, got {side}")
        if level not in LEVELS:
            raise ValueError(f"Glyphs: unknown level {level!r}; choose one of {', '.join(LEVELS)}")
        if min(train, validation, test) < 1:
            raise ValueError(f"Glyphs: each split needs at least 1 image, got {train}, {validation} and {test}")
        check_data_seed("Glyphs: rng_seed", rng_seed)
        images = train + validation + test
        check_memory(4 * images * side**2, f"Glyphs: {images} images need", "make train, validation or test smaller")
        self.side = side
        self.distortion = LEVELS[level]
        self.sizes = (train, validation, test)
        self.fonts = (
            (TRAINING_FONTS, VALIDATION_FONTS, TEST_FONTS) if unseen_fonts else (TRAINING_FONTS,) * len(self.sizes)
        )
        self.rng_seed = rng_seed

    def load(self) -> TaskData:
        splits = []
        drawings = {fonts: draw_fonts(fonts) for fonts in set(self.fonts)}
        for i, (size, fonts) in enumerate(zip(self.sizes, self.fonts, strict=True)):
            generator = torch.Generator().manual_seed(len(self.sizes) * self.rng_seed + i)
            splits.append(render(drawings[fonts], size, self.side, self.distortion, generator=generator))
        return TaskData(*splits, classes=len(CHARACTERS))


def draw_fonts(fonts: Sequence[str]) -> Tensor:  # [fonts, 62, 64, 64] in 0 … 1
    """Draw every character once per font. Raises ValueError if Pillow, matplotlib or a font is missing."""
    try:
        import matplotlib
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ValueError(f"Glyphs: needs the packages matplotlib and pillow ({error}); pip install them") from error
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")

    def load(name: str, height: int) -> Any:
        if name == PILLOW_FONT:
            return ImageFont.load_default(height)
        return ImageFont.truetype(folder / f"{name}.ttf", height, layout_engine=ImageFont.Layout.BASIC)

    def draw(font: Any, character: str) -> Tensor:
        image = Image.new("L", (DRAWING_SIDE, DRAWING_SIDE))
        left, top, right, bottom = font.getbbox(character)
        corner = ((DRAWING_SIDE - (right - left)) / 2 - left, (DRAWING_SIDE - (bottom - top)) / 2 - top)
        ImageDraw.Draw(image).text(corner, character, font=font, fill=255)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(DRAWING_SIDE, DRAWING_SIDE)

    drawings = []
    for name in fonts:
        try:
            _, top, _, bottom = load(name, CAPITAL_HEIGHT).getbbox("H")
            font = load(name, round(CAPITAL_HEIGHT**2 / (bottom - top)))
        except OSError as error:
            raise ValueError(
                f"Glyphs: no font {name!r} in {str(folder)!r} ({error}); pip install --force-reinstall matplotlib"
            ) from error
        drawings.append(torch.stack([draw(font, character) for character in CHARACTERS]))
    return torch.stack(drawings).to(torch.float32) / 255.0


def render(
    drawings: Tensor, count: int, side: int, distortion: Distortion, *, generator: torch.Generator
) -> Split:  # inputs [count, 1, S, S]
    """Render `count` images of random characters in random fonts.

    Args:
        drawings: Drawings of the fonts, [fonts, 62, 64, 64].
        count: Number of images.
        side: Side S of an image.
        distortion: Largest distortions.
        generator: Generator of all random numbers.
    """
    renderer = _Renderer(drawings, side, distortion, generator=generator)
    sizes = [min(RENDER_BATCH, count - begin) for begin in range(0, count, RENDER_BATCH)]
    parts = [renderer.render(size) for size in sizes]
    return Split(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


class _Renderer:
    """Renders batches of images; arguments as for `render`."""

    def __init__(self, drawings: Tensor, side: int, distortion: Distortion, *, generator: torch.Generator) -> None:
        self.side = side
        self.distortion = distortion
        self.generator = generator
        n_fonts = len(drawings)
        flat = drawings.flatten(0, 1)[:, None]
        thick = F.max_pool2d(flat, 3, 1, 1)
        # Half the way only, so that hairlines stay.
        thin = (flat - F.max_pool2d(-flat, 3, 1, 1)) / 2
        self.strokes = torch.stack([flat, thick, thin]).unflatten(1, (n_fonts, -1))  # [3, fonts, 62, 1, 64, 64]
        self.n_fonts = n_fonts

    def render(self, count: int) -> tuple[Tensor, Tensor]:  # [count, 1, S, S], [count] int64
        limits = self.distortion
        glyph, targets = self._draw(count)
        weight = self._share(count, limits.blur) * self._uniform(count, 1, 1, 1)
        glyph = torch.lerp(glyph, F.avg_pool2d(glyph, 3, 1, 1), weight)
        neighbour, _ = self._draw(count, at_edge=True)
        glyph = torch.maximum(glyph, neighbour * self._share(count, limits.clutter))
        ground = limits.background * F.interpolate(
            self._uniform(count, 1, 3, 3), size=self.side, mode="bicubic", align_corners=True
        )
        ink = limits.contrast + (1.0 - limits.contrast) * self._uniform(count, 1, 1, 1)
        image = ground * (1.0 - glyph) + glyph * (ink + ground * (1.0 - ink))
        image = torch.where(self._share(count, 0.5) > 0.0, image, 1.0 - image)
        noise = torch.randn(image.shape, generator=self.generator, dtype=image.dtype)
        return (image + limits.noise * noise - PIXEL_MEAN) / PIXEL_STD, targets

    def _draw(self, count: int, at_edge: bool = False) -> tuple[Tensor, Tensor]:
        """Return distorted characters [count, 1, S, S], with their centres near the edge if asked, and classes."""
        limits = self.distortion
        fonts = self._integers(self.n_fonts, count)
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
        grid = torch.stack(
            [_column(a) * x + _column(b) * y + _column(shift_x), _column(c) * x + _column(d) * y + _column(shift_y)], 3
        )
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


def _column(values: Tensor) -> Tensor:  # [count] -> [count, 1, 1]
    return values[:, None, None]
