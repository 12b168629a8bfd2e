from benchmarks.cases import choose_cases, default_cases


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


def test_peers_take_part_with_one_device_and_data_in_memory():
    cases = choose_cases(["mlp"], [1], [1, 2], ["memory", "grain"])
    assert [case.is_plain for case in cases] == [True, False, False, False]
