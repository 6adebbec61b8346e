"""What is looked for in machine code."""

from vllm_specplus.testing.ahead_of_time import fused_with_a_neighbours_number

SUM = """
--:-:-:-:2\tSHFL.BFLY PT, R2, R7, 0x1, 0x1f;
{between}
--:-:-:-:4\t@P0 FFMA R9, R3, R4, R2;
"""


def test_a_fused_sum_of_a_neighbours_number_is_found() -> None:
    assert fused_with_a_neighbours_number(SUM.format(between="")) == ["@P0 FFMA R9, R3, R4, R2;"]


def test_a_register_that_holds_something_else_by_then_is_none() -> None:
    assert fused_with_a_neighbours_number(SUM.format(between="--:-:-:-:1\tFADD R2, R5, R6;")) == []


def test_behind_a_label_nothing_is_known() -> None:
    assert fused_with_a_neighbours_number(SUM.format(between="--:-:-:-:5\tBRA LBB4;\nLBB11:")) == []
