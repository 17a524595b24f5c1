"""RoCEv2 packets: headers decoded, and capture files read and written in bulk. Pure: bytes in, arrays out."""
