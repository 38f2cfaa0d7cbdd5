"""Which combinations of seeds are evaluated side by side, for many hosts in one pass."""

from collections.abc import Callable, Collection, Sequence

from esper_lightning.growth.counterfactual import Variant


class Views:
    """The entries of a stack in evaluation: each stands for one host, with one or several combinations of its seeds.

    As in `growth.counterfactual`, an entry is divided at the first slot where its combinations differ; but each host
    has combinations of its own.
    """

    def __init__(self) -> None:
        self.variants: Sequence[Sequence[Variant]] = []
        self.entries: list[tuple[int, list[int]]] = []
        self.watch: Callable[[int], None] | None = None  # told how many entries there were, when they become more

    def begin(self, variants: Sequence[Sequence[Variant]], off_trunk: Collection[tuple[str, Collection[int]]]) -> None:
        """A new pass over N hosts.

        Args:
            variants: V combinations for each host.
            off_trunk: Slots that a shortcut leads around, with the hosts whose seed there is blended: for them the
                batch is divided at the input.
        """
        self.variants = variants
        self.entries = [(host, list(range(len(own)))) for host, own in enumerate(variants)]
        for slot, blended in off_trunk:
            self.split(slot, blended)

    @property
    def count(self) -> int:
        return len(self.entries)

    @property
    def hosts(self) -> list[int]:
        """The host of each entry."""
        return [host for host, _ in self.entries]

    def split(self, slot: str, blended: Collection[int]) -> tuple[list[int], list[bool]]:
        """Divides the entries whose combinations differ in `slot`, where the seeds of the hosts `blended` take part.

        Returns for each entry there is then: the entry it came from, and whether the seed takes part.
        """
        sources, expressed, entries = [], [], []
        for source, (host, members) in enumerate(self.entries):
            on = [v for v in members if host in blended and slot in self.variants[host][v]]
            off = [v for v in members if v not in on]
            for part, takes_part in ((on, True), (off, False)):
                if part:
                    entries.append((host, part))
                    sources.append(source)
                    expressed.append(takes_part)
        if self.watch is not None and len(entries) > self.count:
            self.watch(self.count)
        self.entries = entries
        return sources, expressed

    def places(self, host: int) -> list[int]:
        """The entry of each of the host's V combinations."""
        own = {v: i for i, (owner, members) in enumerate(self.entries) if owner == host for v in members}
        return [own[v] for v in range(len(own))]
