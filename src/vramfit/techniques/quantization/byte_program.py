"""Chooses a format for each layer: an integer program whose constraint is the peak in bytes, and near-optimal ones.

NOTE [The peak]: let ``x`` choose one format for each layer, ``W`` be the bytes of its weight and scales, and let a call
of a layer begin with ``A`` bytes that tensors hold beside the weights of linear layers. Within the call its format
takes ``T`` bytes more: its result, rounded inputs, the weight widened. Then the peak is the largest, over the calls, of
``sum W x + A + sum T x``, and of ``sum W x + outside`` between the calls. ``A`` and ``T`` are measured by running the
model once in each format (layer_bytes.py). Since a peak is a maximum, the constraint is one row for each call.

NOTE [Scores]: what a layer's format costs in quality is measured for the layer alone. The sum is what the program
minimises, and it is not what happens: errors of layers add up or cancel. For small errors the KL divergence is a
quadratic form of the change of the logits, so that the products of the layers' changes say what several do together.
Where they are known, the program is solved again with what each format would cost beside the others that were chosen,
and single layers and pairs are exchanged as long as that helps. Several programs are given back, for a joint measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vramfit.techniques.quantization.weight_formats import WeightFormat

Formats = Mapping[str, WeightFormat]

_SECONDS = 10.0
"""For one solution."""

_ROUNDS = 4
"""Times that the program is solved again beside what was chosen."""

_PAIRS_UP_TO = 400
"""Layers times formats up to which pairs are exchanged."""

_MOST_EXCHANGES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCall:
    """A call of a linear layer.

    Attributes:
        level: bytes that are held when it begins, beside the weights of linear layers.
        takes: bytes more at its own peak, by the format's name.
    """

    level: int
    takes: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """What a linear layer takes.

    Attributes:
        weight: bytes of its weight with scales, by the formats that it can have, by name.
        packing: bytes that are needed to pack it, alone on the device, by format.
    """

    name: str
    weight: Mapping[str, int]
    calls: tuple[LayerCall, ...]
    packing: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatTable:
    """What a model takes in any choice of formats, in bytes of tensors.

    Attributes:
        outside: most bytes between the calls of its layers, beside the weights of linear layers.
        uniform: peak of reserved memory with all layers in one format, as run, by its name.
    """

    layers: tuple[LayerBytes, ...]
    outside: int
    uniform: Mapping[str, int] = field(default_factory=dict)

    def peak(self, chosen: Formats) -> int:
        """The peak of tensors for a choice; layers that it does not name stay as they are."""
        names = {one.name: chosen.get(one.name, WeightFormat.NONE).value for one in self.layers}
        weights = sum(one.weight[names[one.name]] for one in self.layers)
        calls = [call.level + call.takes[names[one.name]] for one in self.layers for call in one.calls]
        packing = [one.packing.get(names[one.name], 0) for one in self.layers]
        return max(weights + max([self.outside, *calls]), *packing, 0)

    def weight_bytes(self, chosen: Formats) -> int:
        """Bytes of the weights of linear layers for a choice."""
        return sum(one.weight[chosen.get(one.name, WeightFormat.NONE).value] for one in self.layers)


@dataclass(frozen=True, kw_only=True)
class LayerScores:
    """What formats of single layers cost in quality.

    Attributes:
        alone: the cost of a layer's format by itself, by layer and format; what is not there costs nothing.
        pairs: inner products of the changes that formats make, rows and columns in the order of `alone`; their sum
            over a choice, each with each, is what it costs together. None where it is not known.
    """

    alone: Mapping[tuple[str, WeightFormat], float]
    pairs: Any = None


class FormatProgram:
    """The choices within a limit of bytes."""

    def __init__(self, table: FormatTable, scores: LayerScores) -> None:
        self._table = table
        self._variables: list[tuple[int, WeightFormat]] = []
        self._options: list[list[int]] = []
        cost: list[float] = []
        place = {key: number for number, key in enumerate(scores.alone)}
        rows: list[int | None] = []
        for number, layer in enumerate(table.layers):
            self._options.append([])
            for name in layer.weight:
                one = WeightFormat(name)
                key = (layer.name, one)
                if one is not WeightFormat.NONE and key not in place:
                    continue
                self._options[-1].append(len(self._variables))
                self._variables.append((number, one))
                cost.append(0.0 if one is WeightFormat.NONE else max(0.0, scores.alone[key]))
                rows.append(place.get(key))
        self._cost = np.array(cost)
        self._pairs: Any = None if scores.pairs is None else _laid_out(np.asarray(scores.pairs), rows)
        self._owner = np.array([number for number, _ in self._variables])
        self._bytes = _VariableBytes(table, self._variables)

    def near_optimal(self, limit: int, count: int) -> list[dict[str, WeightFormat]]:
        """Choices whose peak stays within a limit, the best first as far as is known before they run; none if none do.

        Args:
            count: of programs that differ in at least one layer.
        """
        found: list[list[int]] = []
        for _ in range(count):
            chosen = self._solve(self._cost, limit, found)
            if chosen is None:
                break
            found.append(chosen)
        if not found:
            return []
        for start in [found[0], found[-1]]:
            found += self._together(start, limit)
        unique = list(dict.fromkeys(map(tuple, found)))
        return [self._named(one) for one in sorted(unique, key=self._joint)]

    def additive(self, limit: int) -> dict[str, WeightFormat] | None:
        """The choice with the least sum of scores; None where nothing fits."""
        chosen = self._solve(self._cost, limit, [])
        return None if chosen is None else self._named(chosen)

    def smallest(self) -> dict[str, WeightFormat]:
        """The choice with the lowest peak."""
        low, high = 0, max(self._table.peak({}), 0)
        best: list[int] | None = self._solve(self._cost, high, [])
        while high - low > 512:  # the allocator's smallest step, kMinBlockSize in CUDACachingAllocator.cpp
            middle = (low + high) // 2
            chosen = self._solve(self._cost, middle, [])
            if chosen is None:
                low = middle
            else:
                best, high = chosen, min(middle, self._table.peak(self._named(chosen)))
        return {} if best is None else self._named(best)

    def cost(self, chosen: Formats) -> float:
        """The sum of scores of a choice."""
        return sum(
            float(self._cost[variable])
            for variable, (number, one) in enumerate(self._variables)
            if chosen.get(self._table.layers[number].name, WeightFormat.NONE) is one
        )

    def neighbours(self, chosen: Formats, count: int) -> list[dict[str, WeightFormat]]:
        """Choices that differ in one layer and should cost less together, the best first; whatever they take.

        None for a choice with a format that has no score, whose outputs are not finite.
        """
        current = [
            variable
            for layer, options in zip(self._table.layers, self._options, strict=True)
            for variable in options
            if self._variables[variable][1] is chosen.get(layer.name, WeightFormat.NONE)
        ]
        if len(current) < len(self._options):
            return []
        cost = self._joint(current)
        found: list[tuple[float, list[int]]] = []
        for number, options in enumerate(self._options):
            for variable in options:
                other = [*current[:number], variable, *current[number + 1 :]]
                if variable != current[number] and self._joint(other) < cost:
                    found.append((self._joint(other), other))
        return [self._named(one) for _, one in sorted(found)[:count]]

    # -- one program ------------------------------------------------------------------------------------------------

    def _solve(self, cost: Any, limit: int, without: Sequence[Sequence[int]]) -> list[int] | None:
        """The cheapest variables, one of each layer, none of the choices `without`; None if nothing fits."""
        from scipy import optimize, sparse

        count, layers = len(self._variables), len(self._options)
        one_each = sparse.csr_matrix(
            (np.ones(count), (self._owner, np.arange(count))), shape=(layers, count + 1)
        )
        cuts = sparse.lil_matrix((len(without), count + 1))
        for row, chosen in enumerate(without):
            cuts[row, chosen] = 1.0
        scale = float(np.max(np.abs(cost), initial=0.0)) or 1.0
        for tried in range(_TRIES):
            # The solver's tolerance may let a choice pass that is some bytes too large.
            least = limit - tried * _UNIT
            fits = np.array([one <= least for one in self._bytes.packing], dtype=float)
            room = max(0.0, (least - self._table.outside) / _UNIT)
            answer = optimize.milp(
                np.append(cost / scale, 0.0),
                integrality=np.append(np.ones(count), 0.0),
                bounds=optimize.Bounds(np.zeros(count + 1), np.append(fits, room)),
                constraints=[
                    optimize.LinearConstraint(one_each, 1, 1),
                    optimize.LinearConstraint(self._bytes.total, 0, 0),
                    optimize.LinearConstraint(self._bytes.calls, ub=(least - self._bytes.levels) / _UNIT),
                    *([optimize.LinearConstraint(cuts.tocsr(), ub=layers - 1)] if without else []),
                ],
                options={"time_limit": _SECONDS, "mip_rel_gap": 0.0},
            )
            if answer.x is None:
                return None
            picked = [max(options, key=lambda v: float(answer.x[v])) for options in self._options]
            if self._table.peak(self._named(picked)) <= limit:
                return picked
        return None

    def _named(self, chosen: Sequence[int]) -> dict[str, WeightFormat]:
        """A choice of variables, by the layers' names; layers that stay as they are are left out."""
        picked = [self._variables[variable] for variable in chosen]
        return {
            self._table.layers[number].name: one for number, one in picked if one is not WeightFormat.NONE
        }

    # -- several layers together ------------------------------------------------------------------------------------

    def _joint(self, chosen: Sequence[int]) -> float:
        """What a choice costs, with the products of its layers' changes where they are known."""
        index = list(chosen)
        if self._pairs is None:
            return float(self._cost[index].sum())
        return float(self._pairs[np.ix_(index, index)].sum())

    def _together(self, start: list[int], limit: int) -> Iterator[list[int]]:
        """Choices that cost less than one together; none without the products of changes."""
        if self._pairs is None:
            return
        current = start
        for _ in range(_ROUNDS):
            beside = np.diag(self._pairs).copy()
            for number, options in enumerate(self._options):
                others = [variable for layer, variable in enumerate(current) if layer != number]
                for variable in options:
                    beside[variable] += 2 * float(self._pairs[variable, others].sum())
            following = self._solve(beside, limit, [])
            if following is None or self._joint(following) >= self._joint(current):
                break
            current = following
            yield current
        yield self._exchanged(current, limit)

    def _exchanged(self, current: list[int], limit: int) -> list[int]:
        """A choice after exchanges of one layer's format, or of two, that make it cost less."""
        pairs = len(self._variables) <= _PAIRS_UP_TO
        for _ in range(_MOST_EXCHANGES):
            better = self._exchange(current, limit, pairs=pairs)
            if better is None:
                break
            current = better
        return current

    def _exchange(self, current: list[int], limit: int, *, pairs: bool) -> list[int] | None:
        """The exchange that helps most and fits; None where none does."""
        matrix = self._pairs
        towards = matrix[:, current].sum(axis=1)
        moves = [
            (layer, variable)
            for layer, options in enumerate(self._options)
            for variable in options
            if variable != current[layer]
        ]
        if not moves:
            return None
        layers = np.array([layer for layer, _ in moves])
        new = np.array([variable for _, variable in moves])
        old = np.array(current)[layers]
        gain = 2 * (towards[new] - towards[old])
        gain += matrix[new, new] + matrix[old, old] - 2 * matrix[new, old]
        tries: list[tuple[float, tuple[int, ...]]] = [(float(gain[one]), (one,)) for one in range(len(moves))]
        if pairs:
            both = gain[:, None] + gain[None, :]
            cross = matrix[np.ix_(new, new)] - matrix[np.ix_(new, old)]
            cross += matrix[np.ix_(old, old)] - matrix[np.ix_(old, new)]
            both = both + 2 * cross
            rows, columns = np.where((both < 0) & (layers[:, None] < layers[None, :]))
            tries += [(float(both[a, b]), (int(a), int(b))) for a, b in zip(rows, columns, strict=True)]
        for change, numbers in sorted(tries):
            if change >= -1e-12 * abs(self._joint(current)):
                return None
            other = list(current)
            for one in numbers:
                other[moves[one][0]] = moves[one][1]
            if self._table.peak(self._named(other)) <= limit:
                return other
        return None


_UNIT = 512.0
"""Bytes in the program's numbers, the allocator's smallest step (kMinBlockSize in CUDACachingAllocator.cpp)."""

_TRIES = 4


class _VariableBytes:
    """The program's rows: the sum of the weights in a variable of its own, so that each call's row is short."""

    def __init__(self, table: FormatTable, variables: Sequence[tuple[int, WeightFormat]]) -> None:
        from scipy import sparse

        count = len(variables)
        layers = table.layers
        self.packing = [layers[number].packing.get(one.value, 0) for number, one in variables]
        weights = [layers[number].weight[one.value] / _UNIT for number, one in variables]
        self.total = sparse.csr_matrix([[*weights, -1.0]])
        rows = [(number, call) for number, layer in enumerate(layers) for call in layer.calls]
        self.levels = np.array([call.level for _, call in rows], dtype=float)
        matrix = sparse.lil_matrix((len(rows), count + 1))
        owned: dict[int, list[int]] = {}
        for variable, (number, _) in enumerate(variables):
            owned.setdefault(number, []).append(variable)
        for row, (number, call) in enumerate(rows):
            matrix[row, count] = 1.0
            for variable in owned[number]:
                matrix[row, variable] = call.takes[variables[variable][1].value] / _UNIT
        self.calls = matrix.tocsr()


def _laid_out(pairs: Any, rows: Sequence[int | None]) -> Any:
    """Products of changes by variables; a layer that stays as it is changes nothing."""
    found = np.zeros((len(rows), len(rows)))
    known = [variable for variable, row in enumerate(rows) if row is not None]
    places = [row for row in rows if row is not None]
    found[np.ix_(known, known)] = pairs[np.ix_(places, places)]
    return found
