// The token that a server with an access file asks for. It stays in this tab.

import { byId, setText } from "./elements.js";

const KEY = "gradserve-token";

export const token = () => sessionStorage.getItem(KEY) ?? "";

/** The form that asks for the token; `onToken()` is called when one was entered. */
export class TokenForm {
  constructor(onToken) {
    this.form = byId("token");
    this.input = byId("token-value");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, this.input.value.trim());
      this.input.value = "";
      this.form.hidden = true;
      onToken();
    });
  }

  /** Asks for a token, and says why if there was one. */
  ask(error) {
    setText(byId("token-error"), token() ? `That did not work: ${error.message}.` : "");
    sessionStorage.removeItem(KEY);
    this.form.hidden = false;
    this.input.focus();
  }

  /** Drops the token. */
  forget() {
    sessionStorage.removeItem(KEY);
  }
}
