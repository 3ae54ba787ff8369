from vramfit.analysis import ModuleNode, fold_layers, fold_path, module_tree
from vramfit.trace import Category

P, A = Category.PARAMETERS, Category.ACTIVATIONS


def paths(node: ModuleNode) -> dict[str, tuple[int, int]]:
    """Path -> (total bytes, count) of the node and everything below it."""
    found = {node.path: (node.total_bytes, node.count)}
    for child in node.children:
        found |= paths(child)
    return found


def test_totals_are_nested() -> None:
    tree = module_tree([("Net.a.b", P, 3), ("Net.a", P, 5), ("Net.c", A, 7), ("", A, 11)])
    assert paths(tree) == {"": (26, 1), "Net": (15, 1), "Net.a": (8, 1), "Net.a.b": (3, 1), "Net.c": (7, 1)}
    assert tree.own_bytes == 11
    (net,) = tree.children
    assert net.own_bytes == 0
    assert net.categories == {P: 8, A: 7}
    assert [child.name for child in net.children] == ["a", "c"], "largest first"


def test_layers_of_like_structure_are_folded() -> None:
    tree = module_tree(
        [(f"Net.h.{layer}.{part}", P, 10 + layer) for layer in range(3) for part in ("attn", "mlp")]
        + [("Net.head", P, 1)]
    )
    assert paths(fold_layers(tree)) == {
        "": (67, 1),
        "Net": (67, 1),
        "Net.h": (66, 1),
        "Net.h.*": (66, 3),
        "Net.h.*.attn": (33, 3),
        "Net.h.*.mlp": (33, 3),
        "Net.head": (1, 1),
    }


def test_a_layer_with_an_extra_part_is_still_alike() -> None:
    amounts = [(f"Net.{block}.conv", P, 4) for block in range(3)] + [("Net.0.downsample", P, 2)]
    assert paths(fold_layers(module_tree(amounts)))["Net.*"] == (14, 3)


def test_layers_within_layers_are_folded() -> None:
    amounts = [(f"Net.{a}.parts.{b}.conv", P, 1) for a in range(2) for b in range(3)]
    assert paths(fold_layers(module_tree(amounts)))["Net.*.parts.*"] == (6, 6)


def test_numbered_leaves_stay_apart() -> None:
    tree = module_tree([("Net.0", P, 4), ("Net.1", P, 2)])
    assert paths(fold_layers(tree)) == paths(tree)


def test_numbered_blocks_of_different_kinds_stay_apart() -> None:
    tree = module_tree([("Net.0.conv", P, 4), ("Net.1.linear", P, 2)])
    assert paths(fold_layers(tree)) == paths(tree)


def test_own_bytes_survive_folding() -> None:
    tree = module_tree([("Net.0", P, 1), ("Net.0.a", A, 2), ("Net.1", P, 4), ("Net.1.a", A, 8)])
    folded = fold_layers(tree).children[0].children[0]
    assert (folded.own_bytes, folded.total_bytes, folded.count) == (5, 15, 2)
    assert folded.categories == {P: 5, A: 10}


def test_paths_fold_like_layers() -> None:
    assert fold_path("GPT.h.11.attn") == "GPT.h.*.attn"
    assert fold_path("Net.layer1") == "Net.layer1"
    assert fold_path("") == ""
