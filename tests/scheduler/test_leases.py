from scheduler.leases import lease


def test_nodes_that_send_share_the_clusters_way_out_equally() -> None:
    assert sum(lease(1000.0, 3) for _ in range(4)) == 1000.0


def test_an_idle_node_may_begin_at_the_rate_that_it_would_get() -> None:
    assert lease(1000.0, 0) == 1000.0
    assert lease(1000.0, 1) == 500.0


def test_without_a_figure_there_is_no_limit() -> None:
    assert lease(0.0, 5) == 0.0
