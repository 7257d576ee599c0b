"""Published acceptance: every row has its source and could be true, and a table that is none is refused by line."""

import pytest

from kdlab.errors import SchemaError
from kdlab.paths import DATA
from kdlab.study import published_acceptance

SHIPPED = (DATA / "published" / "acceptance.csv").read_text(encoding="utf-8")


def test_the_shipped_table_names_every_source():
    table = published_acceptance()
    assert table["source"].str.startswith("https://").all()
    assert (table["target"] == "moonshotai/Kimi-K2.6").sum() >= 3
    assert set(table["method"]) == {"chain", "tree"}
    derived = table[table["figure"] != "published"]
    for row in derived.to_dict("records"):
        drafted, rate = row["figure"].removeprefix("1 + ").removesuffix(" %").split(" x ")
        assert int(drafted) == row["drafted"]
        assert row["tokens_per_round"] == pytest.approx(1 + row["drafted"] * float(rate) / 100, abs=0.005)


def test_on_k2_the_published_tree_lost_to_the_chain_of_equal_size():
    table = published_acceptance().query("target == 'moonshotai/Kimi-K2-Instruct'")
    pairs = table.pivot_table(index=["workload", "drafted"], columns="method", values="tokens_per_round")
    assert len(pairs) == 4
    assert (pairs["tree"] < pairs["chain"]).all()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("chain,3,3.217", "chain,3,4.217", ":2: tokens_per_round: expected 1 to 4, got 4.217"),
        ("chain,3,3.217", "chain,3,", ":2: tokens_per_round: expected 1 to 4, got nan"),
        ("chain,3,3.217", "star,3,3.217", ":2: method: expected chain or tree, got star"),
        ("chain,3,3.217", "chain,three,3.217", "could not convert"),
        (",https://huggingface.co/AQ-MedAI/Kimi-K26-eagle3,false", ",,false", ":2: source: expected a text, got nan"),
        ("target,drafter", "model,drafter", "expected the columns target"),
    ],
)
def test_other_tables_are_refused(tmp_path, old, new, said):
    path = tmp_path / "t.csv"
    path.write_text(SHIPPED.replace(old, new))
    with pytest.raises(SchemaError, match=said):
        published_acceptance(path)
