"""What a look at an endpoint tells, against real servers."""

import socket
from dataclasses import replace

import pytest

from elastic_adapter.core.config import Credentials
from elastic_adapter.core.probe import tls_trouble
from helpers.etcd_servers import cluster, openssl, secured


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    with secured(folder) as (endpoint, paths):
        openssl(folder, *"req -x509 -newkey rsa:2048 -nodes -keyout other.key -out other.pem -subj /CN=x".split())
        yield endpoint, Credentials(**paths), str(folder / "other.pem")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("plain"), 1) as (one,):
        yield one.endpoint


class TestTlsTrouble:
    """What keeps two sides from talking is said in words that name what to change."""

    def test_none(self, tls):
        """With the right files there is none."""
        endpoint, good, _ = tls
        assert tls_trouble(endpoint, good) == ""

    def test_a_server_with_tls_and_a_client_without(self, tls):
        """The address lacks https://."""
        assert "write https://" in tls_trouble(tls[0], Credentials())

    def test_a_server_without_tls_and_a_client_with(self, plain, tls):
        """The address has an https:// too much."""
        assert "write http://" in tls_trouble(plain, tls[1])

    def test_a_missing_certificate(self, tls):
        """The server wants one of ours."""
        endpoint, good, _ = tls
        assert "--etcd-cert" in tls_trouble(endpoint, replace(good, cert=None, key=None))

    def test_a_stranger_s_authority(self, tls):
        """The server's certificate is signed by somebody else."""
        endpoint, good, other = tls
        assert "not trusted: " in tls_trouble(endpoint, replace(good, ca=other))

    def test_files_that_are_no_certificates(self, tls, tmp_path):
        """The files are named as the trouble."""
        endpoint, good, _ = tls
        broken = tmp_path / "broken.pem"
        broken.write_text("no certificate")
        assert "can't be used" in tls_trouble(endpoint, replace(good, cert=str(broken)))

    def test_no_tls_on_either_side(self, plain):
        """Then TLS is not the trouble."""
        assert tls_trouble(plain, Credentials()) == ""

    def test_a_listener_that_says_nothing(self):
        """Nothing is known of it."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
            assert tls_trouble(endpoint, Credentials(), within_s=0.5) == ""
