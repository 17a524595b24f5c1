"""Rules of `faultbed inventory check` about one subject each."""
