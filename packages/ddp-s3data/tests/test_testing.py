import asyncio

import pytest

from ddp_s3data import S3Options
from ddp_s3data._direct import DirectStore, open_store
from ddp_s3data.testing import MemoryStore, check_object_store

OBJECTS = {"a/1": b"one", "a/2": b"two", "a-b/3": b"three", "ü/4": b"four", "top": b"", "zz": b"z"}


def test_the_store_in_memory_keeps_the_contract():
    asyncio.run(check_object_store(MemoryStore(OBJECTS), OBJECTS))


@pytest.mark.parametrize("transport", ["auto", "aiobotocore"])
def test_the_real_stores_keep_the_contract(fill, aws, transport):
    bucket = fill(OBJECTS)

    async def check():
        store = await open_store(bucket, S3Options(transport=transport))
        assert isinstance(store, DirectStore) == (transport == "auto")
        await check_object_store(store, OBJECTS)

    asyncio.run(check())


def test_a_store_that_breaks_the_contract_is_found():
    class Wrong(MemoryStore):
        async def list(self, prefix, *, delimiter="", token=None, limit=1000):
            page = await super().list(prefix, delimiter=delimiter, token=token, limit=limit)
            return page if token is None else await super().list(prefix, limit=limit)

    with pytest.raises(AssertionError, match="pages come to an end"):
        asyncio.run(check_object_store(Wrong(OBJECTS), OBJECTS))
