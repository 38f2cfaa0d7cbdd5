"""Which combinations of seeds are evaluated side by side, for many hosts in one pass."""

from collections.abc import Callable, Collection, Mapping, Sequence

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

    def begin(self, variants: Sequence[Sequence[Variant]], off_trunk: Mapping[str, Collection[int]]) -> None:
        """A new pass over N hosts.

        Args:
            variants: V combinations for each host.
            off_trunk: Slots that a shortcut leads around, with the hosts whose seed there is blended: for them the
                batch is divided at the input.
        """
        self.variants = variants
        self.entries = [(host, list(range(len(own)))) for host, own in enumerate(variants)]
        for slot, blended in off_trunk.items():
            self.split(slot, [blended])

    @property
    def count(self) -> int:
        return len(self.entries)

    @property
    def hosts(self) -> list[int]:
        """The host of each entry."""
        return [host for host, _ in self.entries]

    def split(self, slot: str, groups: Sequence[Collection[int]]) -> tuple[list[int], list[int]]:
        """Divides the entries whose combinations differ in `slot`, and sorts them by whose seeds take part.

        Args:
            groups: Of hosts whose seeds are blended there; each host is in one, or in none.

        Returns for each entry there is then the entry it came from; and how many entries there are in which a host's
        seed takes part, group by group, and in which none does: in this order they lie.
        """
        parts = self._parts(slot, groups)
        entries = [entry for part in parts for entry in part]
        if self.watch is not None and len(entries) > self.count:
            self.watch(self.count)
        self.entries = [(host, members) for _, host, members in entries]
        return [source for source, _, _ in entries], [len(part) for part in parts]

    def sort(self, slot: str, groups: Sequence[Collection[int]]) -> tuple[list[int], list[int]]:
        """The same where entries were divided at the input, and where they have to stay as they lie: another way that
        leads around the slot has them so."""
        parts = self._parts(slot, groups)
        return [source for part in parts for source, _, _ in part], [len(part) for part in parts]

    def _parts(self, slot: str, groups: Sequence[Collection[int]]) -> list[list[tuple[int, int, list[int]]]]:
        """By groups, those without a seed last: of each entry where it came from, its host and its combinations."""
        group_of = {host: number for number, hosts in enumerate(groups) for host in hosts}
        parts: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(len(groups) + 1)]
        for source, (host, members) in enumerate(self.entries):
            on = [v for v in members if host in group_of and slot in self.variants[host][v]]
            off = [v for v in members if v not in on]
            if on:
                parts[group_of[host]].append((source, host, on))
            if off:
                parts[-1].append((source, host, off))
        return parts

    def places(self) -> list[list[int]]:  # [N][V]
        """The entry of each combination of each host."""
        own: list[dict[int, int]] = [{} for _ in self.variants]
        for entry, (host, members) in enumerate(self.entries):
            own[host].update(dict.fromkeys(members, entry))
        return [[entries[v] for v in range(len(entries))] for entries in own]
