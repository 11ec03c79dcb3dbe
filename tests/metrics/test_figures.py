"""What a worker counts, and under which labels."""

from __future__ import annotations

from app.metrics.families import DURATION, ITL, REQUESTS, TTFT, Kind
from app.metrics.figures import SERIES_KEPT, Figures, Served

NODE = "http://10.0.0.1:1"


def served(
    model: str = "m", path: str = "/v1/completions", outcome: str = "ok", node: str = NODE, took_s: float = 0.3
) -> Served:
    one = Served(path)
    one.model = model
    one.end(node, outcome)
    one.ended_s = one.began_s + took_s
    return one


def counted(figures: Figures) -> dict[tuple[str, ...], float]:
    figures.digest()
    return {labels: number for (family, labels), number in figures.numbers.items() if family is REQUESTS}


def test_requests_are_counted_by_model_route_outcome_and_node() -> None:
    figures = Figures(knows=lambda model: model in ("m", "other model"))
    figures.ended += [served(), served(), served(outcome="aborted"), served("other model", "/v1/embeddings/", node="")]
    assert counted(figures) == {
        ("m", "/v1/completions", "ok", NODE): 2,
        ("m", "/v1/completions", "aborted", NODE): 1,
        ("other model", "/v1/embeddings", "ok", "none"): 1,
    }
    figures.ended.append(served())
    assert counted(figures)["m", "/v1/completions", "ok", NODE] == 3


def test_models_that_no_node_has_are_one_series_and_so_are_routes_that_nobody_knows() -> None:
    figures = Figures(knows=lambda model: False)
    figures.ended += [served(f"made up {n}", f"/v1/made/up/{n}", "client_error", "") for n in range(3000)]
    assert counted(figures) == {("unknown", "other", "client_error", "none"): 3000}


def test_a_name_that_is_no_text_is_a_label_all_the_same() -> None:
    figures = Figures(knows=lambda model: True)
    figures.ended.append(served("\ud800" + "x" * 500))
    ((model, *_),) = counted(figures)
    assert model == "?" + "x" * 199


def test_nodes_that_come_and_go_do_not_make_series_without_end() -> None:
    figures = Figures(knows=lambda model: True)
    kept = SERIES_KEPT[Kind.COUNTER]
    figures.ended += [served(node=f"http://10.0.0.1:{n}") for n in range(kept + 700)]
    found = counted(figures)
    assert len(found) == kept + 1
    assert found["other", "/v1/completions", "ok", "other"] == 700
    # What is known already goes on.
    figures.ended.append(served(node="http://10.0.0.1:5"))
    assert counted(figures)["m", "/v1/completions", "ok", "http://10.0.0.1:5"] == 2


def test_a_duration_is_in_the_bucket_of_the_first_bound_that_it_does_not_exceed() -> None:
    figures = Figures(knows=lambda model: True)
    figures.ended += [served(took_s=took_s) for took_s in (0.25, 0.3, 0.5, 5000.0)]
    figures.digest()
    found = figures.distributions[DURATION, ("m", "/v1/completions", "ok")]
    by_bound = dict(zip((*DURATION.buckets, None), found.counts, strict=True))
    assert {bound: count for bound, count in by_bound.items() if count} == {0.25: 1, 0.5: 2, None: 1}
    assert abs(found.sum - 5001.05) < 1e-6


def test_a_streams_first_bytes_and_the_mean_of_its_gaps_are_counted_by_node() -> None:
    figures = Figures(knows=lambda model: True)
    stream = served(took_s=3.29)
    stream.first_s, stream.chunks = stream.began_s + 0.29, 101  # 100 gaps of 0.03 s
    single = served(took_s=9.0)
    single.first_s, single.chunks = single.began_s + 8.0, 1
    figures.ended += [stream, single, served()]
    figures.digest()
    first = figures.distributions[TTFT, ("m", NODE)]
    gaps = figures.distributions[ITL, ("m", NODE)]
    assert {bound: n for bound, n in zip(TTFT.buckets, first.counts, strict=False) if n} == {0.3: 1, 10.0: 1}
    assert abs(first.sum - 8.29) < 1e-6
    assert sum(gaps.counts) == 100 and abs(gaps.sum - 3.0) < 1e-6
