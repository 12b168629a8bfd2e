"""Tests of the facts that are read from the text of a compiled program."""

import pytest

from armillary.plan import Collective
from armillary.plan._costs import count_rounds
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
