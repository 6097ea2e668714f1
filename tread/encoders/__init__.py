"""Networks of other people that this project only runs: of pictures, of text, autoencoders."""
