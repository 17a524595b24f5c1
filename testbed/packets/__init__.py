"""RoCEv2 packets: what the headers say, and capture files read and written in bulk. Pure: bytes in, arrays out."""
