"""Engines of one machine share through servers, as those of many would: a Redis server, a bucket of S3."""

import pytest

from kvcascade.testing.servers.redis import RedisServer
from kvcascade.testing.servers.s3 import running_store
from kvcascade.testing.vllm import LOADED, behind_host, full_blocks, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with running_store("rclone", tmp_path_factory.mktemp("store")) as store:
        yield store


def check_sharing(engine, way, ask, stack, env):
    """Each loads what the other has computed."""
    one, other = (engine(stack, way, wait=False, env=env) for _ in range(2))
    one.wait_ready(), other.wait_ready()
    assert ask(one) == [0, 0, 0]
    assert ask(other) == LOADED
    later = [prompt(900, 50)]
    assert ask(other, later) == [0]
    assert ask(one, later) == [full_blocks(900)]


def test_two_engines_share_a_redis_server(engine, way, ask, seen, redis):
    stack = behind_host(type="redis", url=redis.url, prefix=f"kvcascade-{way}")
    check_sharing(engine, way, ask, stack, env=None)
    seen.note(way, "second engine at the same time, same Redis server", LOADED)


def test_two_engines_share_a_bucket(engine, way, ask, seen, store):
    bucket = f"kvcascade-{way.lower()}"
    where = {"endpoint_url": store.endpoint, "bucket": bucket, "create_bucket": True, "region": "us-east-1"}
    stack = behind_host(type="s3", promote="always", **where)  # by default at the second use
    check_sharing(engine, way, ask, stack, env=store.environment)
    seen.note(way, "second engine at the same time, same bucket of S3", LOADED)
