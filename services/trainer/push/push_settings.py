"""PushSettings: transport, encoding, addresses, keys and timeouts of a run's weight pushes."""

from dataclasses import dataclass, field

from shared.run_options.pushing import PushEncoding, WantedTransport
from shared.service.tls import PUBLIC_TLS, PeerTls


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """The settings of one run's weight pushes, for one incarnation of its trainer.

    Attributes:
        incarnation: This trainer's value of the run's incarnation counter.
        internal_key: Bearer key of the generators' weight routes.
        peers: TLS settings for calls to generators over https.
        transport: The run's ``weight_transport``; auto is decided anew for each attempt of a push.
        encoding: The run's ``push_encoding``: all weights, only changes, or auto.
        weight_dir: For disk: the parent of the run's directory of versions.
        bind_address: Address of this machine that the generators can reach.
        push_timeout_s: The run's ``push_timeout_s``, in seconds; weight_sender.py lists the deadlines that it sets.
        dtype: Dtype in which the generators' engines must hold the weights; None is not compared.
        info_timeout_s: Longest wait for a replica's state, in seconds. A replica that does not answer is left out.
        buffer_bytes: Size after which a packed chunk is cut; None chooses a size for the transport.
    """

    run_id: str
    incarnation: int
    internal_key: str = field(repr=False)
    peers: PeerTls = PUBLIC_TLS
    transport: WantedTransport
    encoding: PushEncoding = "full"
    weight_dir: str | None = None
    bind_address: str = "127.0.0.1"
    push_timeout_s: float
    dtype: str | None = None
    info_timeout_s: float = 3.0
    buffer_bytes: int | None = None
