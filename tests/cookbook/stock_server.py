"""A stock vLLM server that listens: the scripted one behind a port of this machine."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.client.scripted_vllm import ScriptedVllm


@contextmanager
def listening(server: ScriptedVllm) -> Generator[str]:
    """The server's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._respond()

        def do_POST(self) -> None:
            self._respond()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _respond(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = f"http://{self.headers['Host']}{self.path}"
            response = server.respond(httpx.Request(self.command, url, content=content))
            self.send_response(response.status_code)
            self.send_header("Content-Type", response.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
