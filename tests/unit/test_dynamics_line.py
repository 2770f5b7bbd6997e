from megatron_dynmo.telemetry.dynamics_line import dynamics_line


def test_a_change_is_said_in_short():
    line = dynamics_line(8, "freezing", {"frozen": [1, 2, 3, 4], "embedding": True, "thawed": []})
    assert line == " dynmo iteration      8 | freezing: frozen 1..4, embedding yes, thawed none"


def test_repeated_numbers_are_counted_and_shares_are_rounded():
    what = {"buckets": [4, 4, 4, 16, 16], "density": [0.71234567, 1.0], "products": {"forward": 2}}
    assert dynamics_line(1, "sparse_attention", what) == (
        " dynmo iteration      1 | sparse attention: buckets 4 x3 16 x2, density 0.7123 1, "
        "products (forward 2)"
    )


def test_tables_are_left_out_and_long_lines_cut():
    assert dynamics_line(1, "moe", {"layers": [{"a": 1}]}).endswith("moe: ")
    line = dynamics_line(1, "pruning", {"layers": [k / 1000 for k in range(200)]})
    assert len(line) == 160 and line.endswith(" ...")
