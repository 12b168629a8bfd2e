import pytest

from benchmarks.__main__ import find_peer_pythons, main
from benchmarks.cases import choose_cases, default_cases, full_cases, quick_cases


def modes(cases, task):
    return [case.mode for case in cases if case.task == task]


def test_the_default_matrix_covers_every_task_and_dimension():
    cases = default_cases("cpu")
    assert modes(cases, "many-leaves") == ["loop 1", "loop 10", "loop 100"]
    assert modes(cases, "mlp") == [
        *("loop 1", "loop 10", "loop 100"),
        *("loop 100, grain", "loop 100, resident"),
        *("loop 100, 2 devices", "loop 100, 4 devices"),
    ]
    assert modes(cases, "cnn") == [
        *(f"loop {loop}, canonical convolutions" for loop in (1, 10, 100)),
        "loop 10",
    ]
    assert "loop 10, 2 devices" in modes(cases, "bert")


def test_a_gpu_adds_the_larger_encoder_and_bfloat16():
    cases = default_cases("gpu")
    assert "loop 100, bf16" in modes(cases, "bert-base")
    assert not any("canonical" in case.mode for case in cases)
    assert all(case.options.devices == 1 for case in cases)


def test_the_full_matrix_is_the_product():
    cases = full_cases("cpu")
    assert len(cases) == len(set(cases)) == 4 * 3 * 3 * 3
    assert {case.task for case in full_cases("gpu")} > {case.task for case in cases}


def test_the_quick_matrix_is_tiny_and_has_every_task():
    assert {case.task for case in quick_cases()} == {
        *("mlp", "many-leaves", "cnn", "bert")
    }
    assert all(case.size == "small" for case in quick_cases())


def test_convolutions_are_chosen_for_the_task_that_has_some():
    cases = choose_cases(["mlp", "cnn"], [1], convolutions=["stock", "canonical"])
    assert [(case.task, case.options.convolutions) for case in cases] == [
        *(("mlp", "stock"), ("cnn", "stock"), ("cnn", "canonical"))
    ]


def test_peers_take_part_with_one_device_and_data_in_memory():
    cases = choose_cases(["mlp"], [1], [1, 2], ["memory", "grain"])
    assert [case.is_plain for case in cases] == [True, False, False, False]


def test_peer_interpreters_are_taken_as_given():
    found = find_peer_pythons(["orbit=/a/python", "orbit-xla=/b/python"])
    assert (found["orbit"], found["orbit-xla"]) == ("/a/python", "/b/python")


@pytest.mark.parametrize("entry", ["orbit", "nobody=/a/python"])
def test_a_malformed_peer_interpreter_is_an_error(entry):
    with pytest.raises(SystemExit, match=f"`--peer-python` is '{entry}', but"):
        find_peer_pythons([entry])


def test_help_says_how_to_measure_one_case_and_what_the_default_covers(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "python -m benchmarks --tasks mlp --steps-per-loop 100" in text
    assert "2 and 4 virtual" in text
    assert "Args:" not in text
