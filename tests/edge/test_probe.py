"""What a look at an endpoint tells, against real servers."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from elastic_adapter.core.config import Credentials
from elastic_adapter.core.probe import check_files, probe, tls_trouble
from elastic_adapter.core.succession import Answer
from helpers.etcd_servers import cluster, openssl, secured
from helpers.ports import free_ports


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


# Its only port for connections is the one that it asks for.
TO_ITSELF = """
ip link set lo up && echo 40000 40000 >/proc/sys/net/ipv4/ip_local_port_range && exec "$0" -c "
import asyncio
from elastic_adapter.core.probe import probe
print(asyncio.run(probe('127.0.0.1:40000')).name)"
"""


class TestProbe:
    """Whether somebody listens."""

    def test_a_listener(self):
        """It is open."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert asyncio.run(probe(f"127.0.0.1:{server.getsockname()[1]}")) is Answer.OPEN

    def test_nobody(self):
        """It refuses."""
        assert asyncio.run(probe(f"127.0.0.1:{free_ports(1)[0]}")) is Answer.REFUSED

    @pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, for a network")
    def test_a_connection_to_itself(self):
        """A connection that the kernel gave the asked port as its own shows that nobody listens there."""
        argv = ["unshare", "--net", "sh", "-c", TO_ITSELF, sys.executable]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=30)
        assert (done.stdout, done.stderr) == ("REFUSED\n", "")


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

    def test_a_certificate_of_a_stranger(self, tls, tmp_path):
        """The server does not know who signed ours."""
        endpoint, good, _ = tls
        request = "req -x509 -newkey rsa:2048 -nodes -keyout mine.key -out mine.pem -days 2 -subj /CN=mine"
        openssl(tmp_path, *request.split())
        mine = replace(good, cert=str(tmp_path / "mine.pem"), key=str(tmp_path / "mine.key"))
        assert "does not trust our certificate" in tls_trouble(endpoint, mine)

    def test_no_tls_on_either_side(self, plain):
        """Then TLS is not the trouble."""
        assert tls_trouble(plain, Credentials()) == ""

    def test_a_listener_that_says_nothing(self):
        """Nothing is known of it."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
            assert tls_trouble(endpoint, Credentials(), within_s=0.5) == ""


class TestFiles:
    """What is wrong with them is said before anything is asked."""

    def test_good_ones(self, tls):
        """Nothing is wrong with them, nor with none."""
        assert check_files(tls[1]) is None
        assert check_files(Credentials()) is None

    def test_no_certificates(self, tls, tmp_path):
        """The flag and the file are named."""
        broken = tmp_path / "broken.pem"
        broken.write_text("no certificate")
        assert f"--etcd-ca {broken}: expected" in check_files(replace(tls[1], ca=str(broken)))
        assert f"--etcd-cert {broken}" in check_files(replace(tls[1], cert=str(broken)))

    def test_a_key_of_another(self, tls, tmp_path):
        """Certificate and key must belong together."""
        openssl(tmp_path, *"genrsa -out other.key 2048".split())
        assert "is not the key of --etcd-cert" in check_files(replace(tls[1], key=str(tmp_path / "other.key")))
