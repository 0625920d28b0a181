"""This machine beside its peers: how fast a language model trains here, with Phalanx and with what else there is."""
