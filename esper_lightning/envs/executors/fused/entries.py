"""Combinations of seeds evaluated side by side, for many hosts in one pass. N hosts, V combinations of each."""

from collections.abc import Collection, Mapping, Sequence

from esper_lightning.growth.counterfactual import SeedVariant


class StackEntries:
    """Stack entries of an evaluation pass: each stands for one host with one or more combinations of its seeds.

    As in `forward_variants`, an entry is divided at the first slot where its combinations differ, but each host has its
    own combinations.
    """

    def __init__(self) -> None:
        self.variants: Sequence[Sequence[SeedVariant]] = []
        self.items: list[tuple[int, list[int]]] = []  # host index, and indices of its combinations

    def begin_pass(self, variants: Sequence[Sequence[SeedVariant]], off_trunk: Mapping[str, Collection[int]]) -> None:
        """Begin a pass over N hosts.

        Args:
            variants: Combinations of seeds, [N][V].
            off_trunk: Slots bypassed by a shortcut, with the indices of the hosts with a seed there. Entries
                of these hosts are divided at the input.
        """
        self.variants = variants
        self.items = [(host, list(range(len(combinations)))) for host, combinations in enumerate(variants)]
        for slot, seeded in off_trunk.items():
            self.regroup(slot, [seeded])

    @property
    def count(self) -> int:
        """Number of entries."""
        return len(self.items)

    @property
    def hosts(self) -> list[int]:
        """Host index of each entry."""
        return [host for host, _ in self.items]

    def regroup(self, slot: str, groups: Sequence[Collection[int]], divide: bool = True) -> tuple[list[int], list[int]]:
        """Divide the entries whose combinations differ in `slot`, and order the entries by group.

        Args:
            slot: Name of the slot.
            groups: Indices of the hosts with a seed there, by kind of seed; a host is in at most one group.
            divide: False to leave the entries as they are. For slots off the trunk, whose entries were divided at the
                input: the shortcut around the slot needs them in the present order.

        Returns for each new entry the index of the entry it came from, and the number of entries of each group. An
        entry belongs to its host's group if the seed takes part, and otherwise to one more group at the end.
        """
        group_of = {host: group for group, hosts in enumerate(groups) for host in hosts}
        parts: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(len(groups) + 1)]
        for source, (host, combinations) in enumerate(self.items):
            with_seed = [v for v in combinations if host in group_of and slot in self.variants[host][v]]
            without_seed = [v for v in combinations if v not in with_seed]
            if with_seed:
                parts[group_of[host]].append((source, host, with_seed))
            if without_seed:
                parts[-1].append((source, host, without_seed))
        entries = [entry for part in parts for entry in part]
        if divide:
            self.items = [(host, combinations) for _, host, combinations in entries]
        return [source for source, _, _ in entries], [len(part) for part in parts]

    def entry_of_variant(self) -> list[list[int]]:  # [N][V]
        """Return the index of the entry that holds each combination of each host."""
        entry_by_host: list[dict[int, int]] = [{} for _ in self.variants]
        for entry, (host, combinations) in enumerate(self.items):
            entry_by_host[host].update(dict.fromkeys(combinations, entry))
        return [[entries[v] for v in range(len(entries))] for entries in entry_by_host]
