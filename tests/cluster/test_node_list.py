import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.cluster._node_list import MAX_NODES, expand_counts, expand_nodes
from armillary.errors import ClusterError


def expand(text):
    return expand_nodes("SLURM_STEP_NODELIST", text)


@st.composite
def ranges(draw):
    """Draws the inside of a pair of brackets, and what it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, 4))
        first = draw(st.integers(0, 10**width - 1))
        last = first + draw(st.integers(0, 5))
        low, high = str(first).zfill(width), str(last).zfill(width)
        texts.append(low if first == last else f"{low}-{high}")
        numbers += [str(number).zfill(width) for number in range(first, last + 1)]
    return texts, numbers


@st.composite
def items(draw):
    """Draws one node or one bracketed name, and the nodes that it stands for."""
    name = st.from_regex(r"[a-z_][a-z0-9.-]{0,4}", fullmatch=True)
    text = draw(name)
    nodes = [text]
    for _ in range(draw(st.integers(0, 2))):
        texts, numbers = draw(ranges())
        tail = draw(st.sampled_from(["", "-", "n", ".net"]))
        text += f"[{','.join(texts)}]{tail}"
        nodes = [f"{node}{number}{tail}" for node in nodes for number in numbers]
    return text, nodes


@settings(deadline=None, max_examples=50)
@given(st.lists(items(), min_size=1, max_size=4))
def test_a_list_expands_to_the_nodes_it_was_made_from(parts):
    text = ",".join(part for part, _ in parts)
    assert expand(text) == [node for _, nodes in parts for node in nodes]


@settings(deadline=None, max_examples=50)
@given(st.text(alphabet="n059-,[]. ()x", max_size=20))
def test_any_text_is_a_list_or_a_clear_error(text):
    for parse in (expand_nodes, expand_counts):
        try:
            result = parse("THE_VARIABLE", text)
        except ClusterError as error:
            assert str(error).startswith("`THE_VARIABLE` is")
        else:
            assert len(result) <= MAX_NODES


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), min_size=1))
def test_counts_expand_to_what_they_were_made_from(pairs):
    text = ",".join(
        str(count) if repeats == 1 else f"{count}(x{repeats})"
        for count, repeats in pairs
    )
    expected = [count for count, repeats in pairs for _ in range(repeats)]
    assert expand_counts("SLURM_STEP_TASKS_PER_NODE", text) == expected


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node001", ["node001"]),
        (
            "node[001-003,7],other",
            ["node001", "node002", "node003", "node7", "other"],
        ),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[0-1]n[1-2].net", ["r0n1.net", "r0n2.net", "r1n1.net", "r1n2.net"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_lists_as_slurm_writes_them(text, nodes):
    assert expand(text) == nodes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no node name can be read at column 1"),
        ("a,,b", "no node name can be read at column 3"),
        ("a,", "no node name can be read at column 3"),
        ("n[1-2", "there should be a comma at column 2"),
        ("n1]", "there should be a comma at column 3"),
        ("a b", "there should be a comma at column 2"),
        ("n[]", "there should be a comma at column 2"),
        ("n[1-]", "'1-' is neither a number nor a range"),
        ("n[1,,2]", "'' is neither a number nor a range"),
        ("n[1-2-3]", "'1-2-3' is neither a number nor a range"),
        ("n[3-1]", "the range '3-1' runs backwards"),
        ("n[0-65536]", "it names more than 65536 nodes"),
        ("n[0-999999999]", "it names more than 65536 nodes"),
        ("n[0-999]m[0-999]", "it names more than 65536 nodes"),
    ],
)
def test_a_malformed_list_is_an_error_that_says_where(text, problem):
    with pytest.raises(ClusterError, match=r"it must be a list of nodes") as raised:
        expand(text)
    message = str(raised.value)
    assert message.startswith(f"`SLURM_STEP_NODELIST` is {text!r}, but")
    assert f"and {problem}. Slurm" in message


@pytest.mark.parametrize("text", ["", "2,", "x3", "2(3)", "-1", "2(x)", "2(x3)1"])
def test_malformed_counts_are_an_error(text):
    with pytest.raises(ClusterError, match=r"is not a number of tasks\. Slurm writes"):
        expand_counts("SLURM_STEP_TASKS_PER_NODE", text)


def test_counts_for_too_many_nodes_are_an_error():
    with pytest.raises(ClusterError, match=r"that is more than 65536 nodes\. Start"):
        expand_counts("SLURM_STEP_TASKS_PER_NODE", "1,2(x65536)")
