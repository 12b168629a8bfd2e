"""Tests of the facts that are read from the text of a compiled program."""

import pytest

from armillary.plan import Collective
from armillary.plan._costs import count_rounds
from armillary.plan._groups import find_groups
from armillary.plan._peak import Tensor, find_peak
from armillary.plan._traffic import count_bytes, find_traffic

# A loop over four rows: a slice, a product, a sum that runs during another product, and
# a second sum that needs the first one. `S(1)` is on-chip memory.
LOOP = """HloModule jit_run, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%sliced (p.0: f32[4,2,8], p.1: s32[]) -> f32[2,8] {
  %p.0 = f32[4,2,8]{2,1,0:T(8,128)} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,2,8]{2,1,0} dynamic-slice(%p.0, %p.1, %zero, %zero), \
dynamic_slice_sizes={1,2,8}
  ROOT %bitcast.1 = f32[2,8]{1,0} bitcast(%row)
}

%body (state: (s32[], f32[8,8], f32[4,2,8])) -> (s32[], f32[8,8], f32[4,2,8]) {
  %state = (s32[], f32[8,8]{1,0:T(8,128)}, f32[4,2,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %w = f32[8,8]{1,0} get-tuple-element(%state), index=1
  %rows = f32[4,2,8]{2,1,0} get-tuple-element(%state), index=2
  %x = f32[2,8]{1,0} fusion(%rows, %i), kind=kLoop, calls=%sliced
  %g = (f32[8,8]{1,0}, s8[1024]{0}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul"
  %g.0 = f32[8,8]{1,0} get-tuple-element(%g), index=0
  %ar-start = f32[8,8]{1,0} all-reduce-start(%g.0), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %other = f32[2,8]{1,0:T(8,128)S(1)} custom-call(%x), custom_call_target="other"
  %ar-done = f32[8,8]{1,0} all-reduce-done(%ar-start)
  %new = f32[8,8]{1,0} subtract(%w, %ar-done)
  %second = f32[8,8]{1,0} all-reduce(%new), replica_groups=[1,8]<=[8], to_apply=%add
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[8,8]{1,0}, f32[4,2,8]{2,1,0}) tuple(%next, %second, %rows)
}

%goes_on (state.1: (s32[], f32[8,8], f32[4,2,8])) -> pred[] {
  %state.1 = (s32[], f32[8,8]{1,0}, f32[4,2,8]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%i.1, %four), direction=LT
}

ENTRY %main (w.0: f32[8,8], rows.0: f32[4,2,8]) -> f32[8,8] {
  %w.0 = f32[8,8]{1,0} parameter(0)
  %rows.0 = f32[4,2,8]{2,1,0} parameter(1)
  %zero.1 = s32[] constant(0)
  %begin = (s32[], f32[8,8]{1,0}, f32[4,2,8]{2,1,0}) tuple(%zero.1, %w.0, %rows.0)
  %loop = (s32[], f32[8,8]{1,0}, f32[4,2,8]{2,1,0}) while(%begin), \
condition=%goes_on, body=%body
  %w.1 = f32[8,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %all = f32[64,8]{1,0} all-gather(%w.1), replica_groups={}, dimensions={0}
}
"""


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[]", 4),
        ("pred[3]", 3),
        ("s4[3]", 2),
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", 2048),
        ("(f32[2,3]{1,0}, u8[5]{0}, /*index=2*/f8e4m3fn[7])", 36),
        ("token[]", 0),
    ],
)
def test_sizes_of_types(shape, expected):
    assert count_bytes(shape) == expected


def test_collectives_of_a_loop_have_sizes_groups_and_rounds():
    traffic = find_traffic(LOOP, depth=1, num_devices=8)
    assert traffic.collectives == (
        Collective(
            "all-reduce", 256, "step", group_size=4, is_asynchronous=True, round=1
        ),
        Collective("all-reduce", 256, "step", group_size=8, round=2),
        Collective("all-gather", 2048, "call", group_size=8, round=1),
    )
    assert count_rounds(traffic.collectives, "all-reduce") == 2
    assert traffic.host_transfers == ()


def test_a_start_that_waits_is_not_asynchronous():
    text = LOOP.replace("{4,5,6,7}}", '{4,5,6,7}}, backend_config={"is_sync":true}')
    assert not find_traffic(text, 1, 8).collectives[0].is_asynchronous


def test_collectives_under_a_condition_or_in_a_loop_of_known_length():
    text = LOOP.replace(
        "while(%begin), condition=%goes_on, body=%body",
        "while(%begin), condition=%goes_on, body=%body, backend_config={"
        '"known_trip_count":{"n":"4"}}',
    )
    within_step = find_traffic(text, depth=0, num_devices=8)
    assert [each.times for each in within_step.collectives] == [4, 4, 1]
    text = LOOP.replace(
        "while(%begin), condition=%goes_on, body=%body",
        "conditional(%zero.1, %begin), branch_computations={%body, %goes_on}",
    )
    branch = find_traffic(text, depth=0, num_devices=8).collectives
    assert [each.is_conditional for each in branch] == [True, True, False]


def test_a_condition_shows_the_length_of_a_loop_that_the_compiler_does_not_note():
    assert "known_trip_count" not in LOOP
    times = [each.times for each in find_traffic(LOOP, 0, 8).collectives]
    assert times == [4, 4, 1]
    begins_at_one = LOOP.replace(
        "%zero.1 = s32[] constant(0)", "%zero.1 = s32[] constant(1)"
    )
    assert find_traffic(begins_at_one, 0, 8).collectives[0].times == 3
    # A loop that ends by a value of the program has no known length.
    unknown = LOOP.replace("%four = s32[] constant(4)", "%four = s32[] parameter(1)")
    assert find_traffic(unknown, 0, 8).collectives[0].times == 1


PAIRS = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", PAIRS),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (
            "replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'c'}",
            PAIRS,
        ),
        (
            "replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}",
            [[0, 1, 2, 3], [4, 5, 6, 7]],
        ),
        (
            "replica_groups=mesh['a'=8] {'a':(2)2}",
            [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
        ("source_target_pairs={{0,1},{1,0}}, channel_id=1", [[0, 1], [1, 0]]),
        ("replica_groups={}, to_apply=%add", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_groups_of_devices_have_several_forms(attributes, groups):
    assert find_groups(f"channel_id=1, {attributes}, to_apply=%add", 8) == groups


def test_a_collective_is_slow_if_a_group_spans_islands():
    first, second, _ = find_traffic(LOOP, 1, 8, [0, 0, 0, 0, 1, 1, 1, 1]).collectives
    assert (first.group_size, first.is_slow) == (4, False)
    assert (second.group_size, second.is_slow) == (8, True)


def test_collectives_between_slices_of_tpus_are_transfers_of_hosts():
    transfer = (
        "channel_id=1, is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    text = LOOP.replace(
        "%second = f32[8,8]{1,0} all-reduce(%new), replica_groups=[1,8]<=[8], "
        "to_apply=%add",
        f"%sent = (f32[8,8], u32[], token[]) send(%new), {transfer}\n"
        f"  %got = (f32[8,8], u32[], token[]) recv(%x), {transfer}\n"
        f"  %sent-done = token[] send-done(%sent), {transfer}\n"
        f"  %second = f32[8,8] recv-done(%got), {transfer}",
    )
    found = find_traffic(text, 1, 8, [0, 0, 0, 0, 1, 1, 1, 1])
    _, between, _ = found.collectives
    assert (between.kind, between.num_bytes, between.group_size) == (
        "all-reduce",
        256,
        2,
    )
    assert between.is_slow
    assert found.host_transfers == ()


REPORT = """HloLiveRange (max 9):
  BufferLiveRange:
    w{}:0-9
    x{}:1-9
    gathered{}:2-5
    product{}:4-7
    state{}:3-9
    state{1}:3-9
    sum{}:6-8
    near{}:2-8
BufferAssignment:
allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}:
 value: <1 w @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 4, constant:
 value: <2 x @0> (size=4,offset=0): f32[]
allocation 2: size 1000, preallocated-temp:
 value: <3 gathered @0> (size=500,offset=0): f32[125]{0:T(128)}
 value: <4 product @0> (size=300,offset=500): f32[75]{0}
 value: <5 state{} @0> (size=16,offset=800): (s32[], f32[75])
 value: <6 state{1} (phi) @0> (size=300,offset=500): f32[75]{0}
 value: <7 sum @0> (size=450,offset=0): f32[150]{0}
allocation 3: size 900, preallocated-temp:
 value: <8 near @1> (size=900,offset=0): f32[225]{0:S(1)}
"""
PROGRAM = """
  %gathered = f32[125]{0} all-gather(%w), metadata={op_name="jit(run)/jit(step)/all"}
  ROOT %product = f32[75]{0} dot(%w, %w), metadata={op_name="jit(run)/jit(step)/dot/b"}
"""


def test_the_peak_has_the_temporaries_that_live_together():
    peak = find_peak(REPORT, PROGRAM)
    # Two values share the memory of the product, and others are no temporaries.
    assert peak == (
        Tensor("f32[125]", 500, "all"),
        Tensor("f32[75]", 300, "dot/b"),
    )
    assert find_peak("", PROGRAM) == ()


def test_operations_that_reach_the_host_inside_a_loop_are_named():
    for operation in (
        'custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"',
        "outfeed(%x)",
        "send(%x), is_host_transfer=true",
    ):
        text = LOOP.replace('custom-call(%x), custom_call_target="other"', operation)
        assert len(find_traffic(text, 1, 8).host_transfers) == 1


def test_a_text_that_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="has no ENTRY computation"):
        find_traffic("HloModule nothing", 1, 8)
