"""Trees read without walking down: the very sums of those that are walked."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from router_ext.predict.quick_trees import MAX_LEAVES, QuickTrees
from router_ext.predict.trees import Trees

WIDTH = 12


def forest(rng: random.Random, n_leaves: list[int]) -> Trees:
    """Random trees with so many leaves, grown leaf by leaf."""
    nodes: list[dict[str, Any]] = []
    start, deepest = [], 0
    for wanted in n_leaves:
        start.append(len(nodes))
        nodes.append({"depth": 0})
        leaves = [len(nodes) - 1]
        while len(leaves) < wanted:
            node = leaves.pop(rng.randrange(len(leaves)))
            children = (len(nodes), len(nodes) + 1)
            depth = nodes[node]["depth"] + 1
            nodes += [{"depth": depth}, {"depth": depth}]
            nodes[node] |= {"children": children, "feature": rng.randrange(WIDTH), "threshold": rng.choice((-1, 0, 1))}
            leaves += children
            deepest = max(deepest, depth)
    inner = [node for node in nodes if "children" in node]
    assert all(node["feature"] < WIDTH for node in inner)
    return Trees(
        feature=np.array([node.get("feature", -1) for node in nodes], np.int16),
        threshold=np.array([node.get("threshold", 0) for node in nodes], np.float32),
        left=np.array([node.get("children", (at, at))[0] for at, node in enumerate(nodes)], np.int32),
        right=np.array([node.get("children", (at, at))[1] for at, node in enumerate(nodes)], np.int32),
        value=np.array([rng.gauss(0, 1) for _ in nodes], np.float32),
        start=np.array(start, np.int32),
        offset=np.array([rng.gauss(5, 1)], np.float32),
        depth=np.array([deepest], np.int32),
    )


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_equal_to_the_last_bit(seed: int) -> None:
    rng = random.Random(seed)
    trees = forest(rng, [rng.choice((1, 2, 3, 24, MAX_LEAVES)) for _ in range(40)])
    # Inputs at thresholds too: "at or below" is left.
    inputs = np.random.default_rng(seed).choice(np.array([-2, -1, -0.5, 0, 0.5, 1, 2], np.float32), (50, WIDTH))
    assert np.array_equal(QuickTrees(trees).predict(inputs), trees.predict(inputs))


def test_a_tree_with_too_many_leaves_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 32 leaves"):
        QuickTrees(forest(random.Random(1), [3, MAX_LEAVES + 1]))


def test_a_tree_that_goes_round_in_a_circle_is_refused() -> None:
    trees = forest(random.Random(1), [3])
    trees.left[0] = 0
    with pytest.raises(ValueError, match="more than 32 leaves"):
        QuickTrees(trees)
