"""Pass connections on to another address, such as out of a network namespace: Unix sockets are files for all of them.

python relay.py tcp:9000 unix:/tmp/relay        # in the namespace
python relay.py unix:/tmp/relay tcp:29051       # outside
"""

import asyncio
import sys
from contextlib import suppress


async def main(listen_at: str, target: str) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, where = target.split(":")
        with suppress(OSError):
            if kind == "unix":
                far_reader, far_writer = await asyncio.open_unix_connection(where)
            else:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int(where))
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))

    kind, where = listen_at.split(":")
    if kind == "unix":
        server = await asyncio.start_unix_server(handle, where)
    else:
        server = await asyncio.start_server(handle, port=int(where))
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
