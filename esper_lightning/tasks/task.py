"""Interface of tasks: data on a device, and a function that measures outputs against targets; a generated one."""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error
from torchmetrics.functional.regression import r2_score
from torchmetrics.functional.text import perplexity

from esper_lightning.runtime.registry import import_object, suggest_name

if TYPE_CHECKING:
    from esper_lightning.tasks.datamodule import Stream

CALIBRATION_BINS = 15  # of confidence, as in https://arxiv.org/abs/1706.04599

SPLITS = ("train", "validation", "test")

LARGEST_SHARE = 1.00001
"""Largest number that is taken for a share: sums of shares are rounded."""

TOKEN_ELEMENTS = 256
"""Numbers that a network makes of one token, features and logits: those of a vocabulary of bytes."""

Score = Literal["accuracy", "likelihood", "r2"]
"""Names of the scores by which a task judges hosts. A score is a number per sample, without a unit and at most 1; the
score of a host is the mean over samples.

- accuracy: share of correct predictions.
- likelihood: 1 − cross-entropy / ln(classes). Uniform guesses have 0. A perplexity p of C classes is 1 − ln(p) / ln(C).
- r2: 1 − squared error, for quantities that are scaled to mean 0 and standard deviation 1 in the training data, whose
  mean as a prediction has 0.
"""

CENTRES = 4
"""Centres of each class of generated samples: with more than one, a linear model does not suffice."""

SCALED = 0.1
"""Largest distance of mean and standard deviation of quantities in the training data from 0 and 1."""


@dataclass(frozen=True, eq=False)
class Split:
    """One split of a data set: `inputs, targets = split`.

    Integers may be stored as uint8, which `batch` turns into what networks take: images, which are the inputs of four
    axes or more, into floats, and everything else into int64.
    """

    inputs: Tensor  # [variants · samples, …]
    targets: Tensor  # [variants · samples, …] integers: classes or tokens; floats: quantities
    variants: int = field(default=1, kw_only=True)  # of the data, one after the other
    # Mean and standard deviation of the values of uint8 images, such as [C, 1, 1]. None: images are divided by 255.
    scale: tuple[Tensor, Tensor] | None = field(default=None, kw_only=True)
    copies: Mapping[torch.device, "Split"] = field(default_factory=dict, kw_only=True)  # if it lies on several devices

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.inputs, self.targets))

    def to(self, device: torch.device) -> "Split":
        """Return the split on a device."""
        if device in self.copies:
            return self.copies[device]
        scale = None if self.scale is None else (self.scale[0].to(device), self.scale[1].to(device))
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device), scale=scale, copies={})

    def copy_to(self, devices: Sequence[torch.device]) -> "Split":
        """Return the split on the first of these devices, with a copy on each other; `to` returns them."""
        copies = {device: self.to(device) for device in devices}
        return replace(copies[devices[0]], copies=copies if len(devices) > 1 else {})

    def batch(self, rows: Tensor | slice = slice(None)) -> "Split":
        """Return samples as networks take them, as a view where nothing is stored as uint8."""
        inputs, targets = self.inputs[rows], self.targets[rows]
        if inputs.dtype is torch.uint8 and inputs.ndim > 3:
            mean, deviation = self.scale or (0.0, 255.0)
            inputs = inputs.float().sub_(mean).div_(deviation)
        elif inputs.dtype is torch.uint8:
            inputs = inputs.long()
        return Split(inputs, targets.long() if targets.dtype is torch.uint8 else targets)

    def parts(self, samples: int) -> Iterator["Split"]:
        """Return batches of this number of samples, in order; the last one may have fewer."""
        return (self.batch(slice(start, start + samples)) for start in range(0, len(self.inputs), samples))

    def variant(self, index: int) -> "Split":
        """Return one variant of the data as a view."""
        if self.variants == 1:
            return self
        return Split(*(part.unflatten(0, (self.variants, -1))[index] for part in self), scale=self.scale)

    @property
    def samples(self) -> int:
        """Number of samples in one variant."""
        return self.inputs.shape[0] // self.variants

    @property
    def elements(self) -> int:
        """Numbers by which the memory for one sample is estimated: those of an input, and `TOKEN_ELEMENTS` a token."""
        is_text = self.inputs.ndim <= 3 and not self.inputs.is_floating_point()
        return self.inputs[0].numel() * (TOKEN_ELEMENTS if is_text else 1)


class TaskData(NamedTuple):
    """A data set. Hosts are trained on `train`, rewards come from `validation`, and only evaluations use `test`."""

    train: Split  # with a stream: its first samples, on which seeds and executors are tried
    validation: Split
    test: Split
    outputs: int  # of a host: number of classes or tokens, or of quantities per sample
    stream: "Stream | None" = None  # of training data that do not fit into memory

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, without the batch axis."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def chance_loss(self) -> float:
        """Loss of a host that has learned nothing: that of uniform guesses, or of the mean of scaled quantities."""
        return 1.0 if self.train.targets.is_floating_point() else math.log(self.outputs)

    def copy_to(self, devices: Sequence[torch.device]) -> "TaskData":
        """Return the data set on the first of these devices, with a copy on each other; `Split.to` returns them."""
        return self._replace(**{name: getattr(self, name).copy_to(devices) for name in SPLITS})


class Measures(NamedTuple):
    """Loss and score of each sample in a batch."""

    loss: Tensor  # [B] float
    score: Tensor  # [B] float, at most 1; the higher the better


class Task(ABC):
    """A data set and the measure of outputs on it."""

    score: Score = "accuracy"
    metric: str | None = None
    """Import path of a function that takes the place of `score`: of outputs and targets, to a number per sample, at
    most 1, such as a function of torchmetrics with its arguments but these two given."""

    @property
    def score_name(self) -> str:
        """Name of the score in tables."""
        return self.score if self.metric is None else self.metric.rpartition(".")[2]

    @abstractmethod
    def load(self) -> TaskData:
        """Return the whole data set on the CPU. Raises ValueError with instructions if files are missing."""

    def measure(self, outputs: Tensor, targets: Tensor) -> Measures:
        """Return loss and score per sample. The loss is cross-entropy, or squared error for quantities.

        Computed in the precision of the outputs, at least float32: bf16 has no value between 0.996 and 1.

        Args:
            outputs: Logits [B, classes] or [B, T, classes]; quantities [B, k].
            targets: Class numbers [B] or [B, T]; quantities [B] or [B, k].
        """
        # Executors need a number per sample, because a batch may hold several hosts or combinations of seeds. Means by
        # torchmetrics would also be slower: 1.5 times the processor time with its functions and 4.5 times with its
        # metric objects, which then add 12 % to the validation of a digits host.
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.score == "r2":
            loss = (outputs - targets.view_as(outputs)).square().mean(1)
            score = 1.0 - loss.detach()
        else:
            loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape)
            if self.score == "likelihood":
                score = 1.0 - loss.detach() / math.log(outputs.shape[-1])
            elif self.score == "accuracy":
                score = (outputs.argmax(-1) == targets).to(loss.dtype)
            else:
                known = suggest_name(self.score, get_args(Score))
                raise ValueError(f"task {type(self).__name__}: unknown score {self.score!r}; {known}")
            if targets.ndim > 1:
                loss, score = loss.flatten(1).mean(1), score.flatten(1).mean(1)
        if self.metric is not None:
            score = import_object(self.metric, "metric")(outputs.detach(), targets).to(loss.dtype)
        return Measures(loss, score)

    def test_metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return further metrics of one host on the test split, by name; arguments are those of `measure`.

        - Classes: `calibration_error`, the expected calibration error (https://arxiv.org/abs/1706.04599); and
          `accuracy.<class>`, NaN for a class without samples.
        - Tokens: `perplexity`, e to the mean cross-entropy per token.
        - Quantities: `r2`, the coefficient of determination, which refers to the mean of the test data.
        """
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        if self.score == "r2":
            return {"r2": r2_score(outputs, targets.view_as(outputs)).item()}
        if targets.ndim > 1:
            return {"perplexity": perplexity(outputs, targets).item()}
        classes = outputs.shape[-1]
        probabilities = outputs.softmax(-1)  # torchmetrics would take logits that all lie in [0, 1] for probabilities
        error = multiclass_calibration_error(probabilities, targets, classes, CALIBRATION_BINS)
        accuracies = multiclass_accuracy(probabilities, targets, classes, average=None)
        is_absent = torch.bincount(targets, minlength=classes) == 0
        shares = accuracies.masked_fill(is_absent, torch.nan).tolist()
        return {"calibration_error": error.item()} | {f"accuracy.{c}": share for c, share in enumerate(shares)}


def check_data(data: TaskData, task: str, score: Score = "accuracy") -> None:
    """Raise ValueError, naming the split, unless hosts can learn from `data`: on a GPU torch would not say why."""
    for name, split in zip(SPLITS, data[:3], strict=True):
        check_split(split, data, f"task {task}: its {name} data", score)
    if score == "r2":
        quantities = data.train.targets.double()
        mean, spread = quantities.mean(0), quantities.std(0, correction=0)
        if mean.abs().max() > SCALED or (spread - 1.0).abs().max() > SCALED:
            raise ValueError(
                f"task {task}: its quantities have mean {quantities.mean():.3g} and standard deviation "
                f"{quantities.std():.3g} in the training data; scale them to 0 and 1"
            )


def check_split(split: Split, data: TaskData, source: str, score: Score = "accuracy") -> None:
    """Raise ValueError unless hosts can learn from a split, or a chunk of a stream, as from the rest of `data`."""
    wrong, (inputs, targets) = "", split
    if not 0 < len(inputs) == len(targets):
        wrong = f"{len(inputs)} inputs and {len(targets)} targets; get the data set again"
    elif inputs.shape[1:] != data.train.inputs.shape[1:]:
        wrong = f"inputs {list(inputs.shape[1:])}, the training data {data.input_shape}"
    elif inputs.ndim > 3 and not inputs.is_floating_point() and inputs.dtype is not torch.uint8:
        wrong = f"images of {inputs.dtype}; give floats, or uint8 from 0 to 255"
    elif inputs.is_floating_point() and not inputs.isfinite().all():
        wrong = "inputs that are not finite; get the data set again"
    elif score == "r2":
        if not targets.is_floating_point() or not targets.isfinite().all():
            wrong = f"targets of {targets.dtype}, or not finite; the score r2 needs quantities, float32"
        elif targets[0].numel() != data.outputs:
            wrong = f"{targets[0].numel()} quantities per sample, and `outputs` is {data.outputs}"
    elif targets.is_floating_point():
        wrong = f"targets of {targets.dtype}; give the number of the class, int64, or quantities the score r2"
    elif not 0 <= int(targets.min()) <= int(targets.max()) < data.outputs:
        least, most = int(targets.min()), int(targets.max())
        wrong = f"targets {least} … {most}, outside of 0 … {data.outputs - 1}; correct `outputs` or the targets"
    if wrong:
        raise ValueError(f"{source} have {wrong}")


def check_outputs(outputs: object, expected: int, score: Score) -> None:
    """Raise ValueError unless the outputs of a host have a number for each class, or for each quantity."""
    shape = list(outputs.shape) if isinstance(outputs, Tensor) else []
    if len(shape) < 2 or (math.prod(shape[1:]) != expected if score == "r2" else shape[-1] < expected):
        found = shape if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        kind = "quantities" if score == "r2" else "classes"
        raise ValueError(
            f"the host's forward returned {found}, and the task has {expected} {kind}; return a tensor [B, …] with as "
            "many outputs as the host's constructor is given"
        )


def check_measures(measures: Measures, samples: int, task: str) -> None:
    """Raise ValueError unless `measures` are a loss and a score, at most 1, for each sample."""
    if any(getattr(values, "shape", None) != (samples,) for values in measures):
        raise ValueError(
            f"task {task}: measure returned other shapes than ({samples},) for {samples} samples; return Measures of a "
            "number per sample, such as F.cross_entropy(…, reduction='none')"
        )
    if not all(values.is_floating_point() for values in measures):
        kinds = " and ".join(str(values.dtype) for values in measures)
        raise ValueError(f"task {task}: measure returned {kinds}; return floats, as by (outputs == targets).float()")
    if measures.score.max() > LARGEST_SHARE:
        raise ValueError(f"task {task}: a score is {measures.score.max():.4g}; divide it by the largest possible one")


def fingerprint(data: TaskData) -> str:
    """Return a description like `897 + 200 + 700 samples of 10 classes, checksum 8d1f03aa`, the same on any device."""
    checksum = 0
    for split in data[:3]:
        for tensor in (*split, *(split.scale or ())):
            checksum = zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data, checksum)
    kind = "quantities" if data.train.targets.is_floating_point() else "classes"
    sizes = " + ".join(str(split.samples) for split in data[:3])
    return f"{'stream: ' if data.stream else ''}{sizes} samples of {data.outputs} {kind}, checksum {checksum:08x}"


class Synthetic(Task):
    """Classification of generated samples; each class is a mixture of standard Gaussians around random centres.

    Args:
        shape: Shape of one input: [3, 32, 32] for images, [20] for vectors.
        classes: Number of classes.
        train, validation, test: Number of samples in each split.
    """

    def __init__(
        self,
        shape: Sequence[int] = (3, 32, 32),
        classes: int = 10,
        *,
        train: int = 1024,
        validation: int = 256,
        test: int = 256,
    ) -> None:
        if min(train, validation, test, classes - 1, *shape) < 1:
            raise ValueError("Synthetic: sizes and counts must be positive, and classes at least 2")
        self.shape = tuple(shape)
        self.classes = classes
        self.sizes = (train, validation, test)

    def load(self) -> TaskData:
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(self.classes * CENTRES, *self.shape, generator=generator)

        def split(samples: int) -> Split:
            chosen = torch.randint(len(centres), (samples,), generator=generator)
            noise = torch.randn(samples, *self.shape, generator=generator)
            return Split(centres[chosen] + noise, chosen % self.classes)

        return TaskData(*map(split, self.sizes), outputs=self.classes)
