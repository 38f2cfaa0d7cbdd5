"""Combinations of seeds evaluated side by side, for many hosts in one pass. N hosts, V combinations of each."""

from collections.abc import Callable, Collection, Mapping, Sequence

from esper_lightning.growth.counterfactual import Variant


class Views:
    """Stack entries of an evaluation pass: each stands for one host with one or more combinations of its seeds.

    As in `forward_variants`, an entry is divided at the first slot where its combinations differ, but each host has its
    own combinations.
    """

    def __init__(self) -> None:
        self.variants: Sequence[Sequence[Variant]] = []
        self.entries: list[tuple[int, list[int]]] = []
        self.watch: Callable[[int], None] | None = None  # called with the number of entries before it grows

    def begin(self, variants: Sequence[Sequence[Variant]], off_trunk: Mapping[str, Collection[int]]) -> None:
        """Begin a pass over N hosts.

        Args:
            variants: Combinations of seeds, [N][V].
            off_trunk: Slots bypassed by a shortcut, with the indices of the hosts whose seed there is blended. Entries
                of these hosts are divided at the input.
        """
        self.variants = variants
        self.entries = [(host, list(range(len(own)))) for host, own in enumerate(variants)]
        for slot, blended in off_trunk.items():
            self.split(slot, [blended])

    @property
    def count(self) -> int:
        """Number of entries."""
        return len(self.entries)

    @property
    def hosts(self) -> list[int]:
        """Host index of each entry."""
        return [host for host, _ in self.entries]

    def split(self, slot: str, groups: Sequence[Collection[int]]) -> tuple[list[int], list[int]]:
        """Divide the entries whose combinations differ in `slot`, and order the entries by group.

        Args:
            slot: Name of the slot.
            groups: Indices of the hosts with a blended seed there, by kind of seed; a host is in at most one group.

        Returns for each new entry the index of the entry it came from, and the number of entries of each group. An
        entry belongs to its host's group if the seed takes part, and otherwise to one more group at the end.
        """
        parts = self._parts(slot, groups)
        entries = [entry for part in parts for entry in part]
        if self.watch is not None and len(entries) > self.count:
            self.watch(self.count)
        self.entries = [(host, members) for _, host, members in entries]
        return [source for source, _, _ in entries], [len(part) for part in parts]

    def sort(self, slot: str, groups: Sequence[Collection[int]]) -> tuple[list[int], list[int]]:
        """Return what `split_at` returns, but leave the entries as they are.

        For slots off the trunk, whose entries were divided at the input: the shortcut around the slot needs them in the
        present order.
        """
        parts = self._parts(slot, groups)
        return [source for part in parts for source, _, _ in part], [len(part) for part in parts]

    def _parts(self, slot: str, groups: Sequence[Collection[int]]) -> list[list[tuple[int, int, list[int]]]]:
        """Return the new entries of each group, those without the seed last.

        An entry is (index of the entry it came from, host index, indices of its combinations). Host 0 with the
        combinations [0, 1], of which only 0 uses the seed, gives [[(0, 0, [0])], [(0, 0, [1])]].
        """
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
        """Return the index of the entry that holds each combination of each host."""
        own: list[dict[int, int]] = [{} for _ in self.variants]
        for entry, (host, members) in enumerate(self.entries):
            own[host].update(dict.fromkeys(members, entry))
        return [[entries[v] for v in range(len(entries))] for entries in own]
