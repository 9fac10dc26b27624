"""One module per way of calling a peer: class Peer(Adapter)."""
